"""What is counted: every number against a round that was written by hand."""

from __future__ import annotations

import pytest

from specdec import SpeculativeDecoder
from specdec.draft import ROOT
from specdec.drafters.base import Drafter
from specdec.metrics import RoundRecord, Statistics
from specdec.policies import FixedPolicy
from tests.drafters import DRAFTERS, Scripted, autoregressive, random_trees
from tests.tiny import PROMPT, architecture, plain, ragged

TARGET = architecture("llama")
NEW = plain(TARGET, PROMPT, 40)


def right_for(*counts: int, length: int = 8) -> Drafter:
    """Drafts `length` tokens in every round; in round i the first `counts[i]` of them are right."""
    script = iter(counts)

    def draft(row: int, text: list[int], limit: int) -> tuple[list[int], list[int]]:
        right = next(script)
        place = len(text) - len(PROMPT)
        tokens = NEW[place : place + min(length, limit)]
        wrong = [(token + 1) % 64 for token in tokens[right:]]
        return tokens[:right] + wrong, list(range(ROOT, len(tokens) - 1))

    return Scripted(draft=draft)


def record(**changes: object) -> RoundRecord:
    values = {
        "index": 0, "rows": [0], "drafted": [4], "draft_length": [4], "accepted": [2],
        "committed": [3], "cut": [False], "draft_seconds": 0.1, "verify_seconds": 0.2,
        "seconds": 0.4, "tokens": [[1, 2, 3]],
    }  # fmt: skip
    return RoundRecord(**(values | changes))


# --- the definitions ------------------------------------------------------------------------------


def test_three_rounds_that_accept_two_none_and_all():
    output = SpeculativeDecoder(TARGET, right_for(2, 0, 8)).generate(PROMPT, max_new_tokens=14)
    assert output.token_ids == [NEW[:14]]
    found = output.statistics
    assert (found.rounds, found.drafted, found.accepted) == (3, 24, 10)
    assert sum(sum(each.committed) for each in output.rounds) == 13
    assert found.new_tokens == 14, "one comes from the prompt's pass"
    assert found.accepted / found.rounds == pytest.approx(10 / 3)
    assert found.tau == pytest.approx(13 / 3)
    assert found.alpha == pytest.approx(10 / 12), "3 + 1 + 8 tokens were judged"
    assert found.alpha_by_position == pytest.approx([2 / 3] * 2 + [1 / 3] * 6)
    assert found.conditional_alpha_by_position == pytest.approx([2 / 3, 1, 1 / 2, 1, 1, 1, 1, 1])
    assert found.mean_draft_length == 8


def test_a_text_that_ends_inside_a_draft():
    """What stands behind the end was never judged: it is no rejection."""
    output = SpeculativeDecoder(TARGET, right_for(8)).generate(
        PROMPT, max_new_tokens=20, eos_token_id=NEW[3]
    )
    found = output.statistics
    assert (found.rounds, found.drafted, found.accepted, found.new_tokens) == (1, 8, 3, 4)
    assert found.alpha == 1.0
    assert found.alpha_by_position == [1.0, 1.0, 1.0]
    assert found.tau == 3.0
    assert output.rounds[0].cut == [True]


def test_a_draft_that_is_shorter_counts_where_it_reached():
    found = Statistics.from_rounds(
        [record(), record(drafted=[1], draft_length=[1], accepted=[1], committed=[2])], 6
    )
    assert found.alpha_by_position == [1.0, 1.0, 0.0, 0.0]
    assert found.conditional_alpha_by_position == [1.0, 1.0, 0.0]
    assert found.alpha == pytest.approx(3 / 4)
    assert found.mean_draft_length == 2.5


def test_a_round_without_a_draft_lowers_tau_and_not_alpha():
    nothing = record(drafted=[0], draft_length=[0], accepted=[0], committed=[1])
    found = Statistics.from_rounds([record(), nothing], 5)
    assert found.tau == 2.0
    assert found.alpha == pytest.approx(2 / 3)
    assert found.mean_draft_length == 2.0


def test_nothing_at_all():
    found = Statistics.from_rounds([], 0)
    assert (found.tau, found.alpha, found.mean_draft_length, found.tokens_per_s) == (0, 0, 0, 0)
    assert found.alpha_by_position == []


def test_a_tree_counts_nodes_and_levels():
    """Two nodes on the first level, two below the second of them, the second one right."""

    def draft(row: int, text: list[int], limit: int) -> tuple[list[int], list[int]]:
        place = len(text) - len(PROMPT)
        one, two = NEW[place : place + 2]
        return [(one + 1) % 64, one, (two + 1) % 64, two], [ROOT, ROOT, 1, 1]

    output = SpeculativeDecoder(TARGET, Scripted(draft=draft)).generate(PROMPT, max_new_tokens=7)
    found = output.statistics
    assert (found.rounds, found.drafted, found.accepted) == (2, 8, 4)
    assert found.mean_draft_length == 2
    assert found.alpha == 1.0
    assert found.tau == 3.0


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["autoregressive", "ngram", "eagle2", "cape"])
def test_rows_add_up_to_the_whole(drafter):
    decoder = SpeculativeDecoder(TARGET, DRAFTERS[drafter](TARGET), "svip")
    output = decoder.generate([PROMPT, *ragged(3)], max_new_tokens=14, eos_token_id=NEW[9])
    whole, rows = output.statistics, output.row_statistics
    for name in ("new_tokens", "rounds", "drafted", "accepted"):
        assert sum(getattr(row, name) for row in rows) == getattr(whole, name)
    assert [row.new_tokens for row in rows] == [len(tokens) for tokens in output.token_ids]
    for row, tokens in zip(rows, output.token_ids, strict=True):
        assert row.tau == pytest.approx((len(tokens) - 1) / row.rounds)


def test_records_tell_what_each_row_got():
    decoder = SpeculativeDecoder(TARGET, autoregressive(TARGET), FixedPolicy(length=3))
    output = decoder.generate(ragged(3), max_new_tokens=12, eos_token_id=NEW[9])
    written: list[list[int]] = [tokens[:1] for tokens in output.token_ids]
    for index, each in enumerate(output.rounds):
        assert each.index == index
        for place, row in enumerate(each.rows):
            assert len(each.tokens[place]) == each.committed[place]
            assert each.accepted[place] in (each.committed[place], each.committed[place] - 1)
            written[row] += each.tokens[place]
    assert written == output.token_ids


# --- trees and times ------------------------------------------------------------------------------


def test_trees_are_kept_when_asked_for():
    text = PROMPT + NEW
    decoder = SpeculativeDecoder(TARGET, random_trees([text]))
    output = decoder.generate(PROMPT, max_new_tokens=20, keep_trees=True)
    written = 1
    for each in output.rounds:
        tree = each.tree
        path = tree["accepted"][0]
        assert len(path) == each.accepted[0]
        assert [tree["tokens"][0][node] for node in path] == NEW[written : written + len(path)]
        assert [tree["parents"][0][node] for node in path] == [ROOT, *path[:-1]][: len(path)]
        assert sum(tree["valid"][0]) == each.drafted[0]
        written += each.committed[0]
    assert decoder.generate(PROMPT, max_new_tokens=4).rounds[0].tree is None


def test_times_add_up():
    decoder = SpeculativeDecoder(TARGET, autoregressive(TARGET), "fixed")
    output = decoder.generate(PROMPT, max_new_tokens=20)
    found = output.statistics
    parts = found.prefill_s, found.draft_s, found.verify_s, found.other_s
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(found.wall_s)
    assert found.tokens_per_s == pytest.approx(20 / found.wall_s)
    for each in output.rounds:
        assert 0 < each.draft_seconds + each.verify_seconds < each.seconds
    assert output.row_statistics[0].wall_s == 0.0, "times are of all rows together"
