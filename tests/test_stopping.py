"""Where texts end: nothing after the end is in the tokens, the text, the statistics or the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteria, StopStringCriteria, TextStreamer

from specdec import SpecdecError, SpeculativeDecoder
from specdec.draft import ROOT
from specdec.drafters.ngram import NgramDrafter
from specdec.generation import StopRules
from specdec.policies import FixedPolicy
from tests.drafters import DRAFTERS, Scripted, autoregressive, random_trees
from tests.tiny import PROMPT, architecture, plain, ragged
from tests.tiny_tokenizers import speaking_llama

TARGET = architecture("llama")
NEW = plain(TARGET, PROMPT, 40)


def decoder(drafter: str = "twin", length: int = 8, **arguments: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        TARGET, DRAFTERS[drafter](TARGET), FixedPolicy(length=length), **arguments
    )


def ends_well(output, count: int) -> None:
    """Tokens, statistics and cache agree that `count` tokens were written."""
    assert len(output.token_ids[0]) == count
    assert output.statistics.new_tokens == count
    committed = sum(sum(record.committed) for record in output.rounds)
    assert committed == max(0, count - 1), "the first token comes from the prompt's pass"
    assert output.statistics.accepted <= committed
    state = output.generation.state
    assert state.cache.lengths == [len(PROMPT) + max(0, count - 1)]
    assert state.lengths == [len(PROMPT) + count]


# --- end-of-text tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(1, 20))
def test_eos_at_every_place_of_a_block(place):
    eos = NEW[place]
    count = NEW.index(eos) + 1
    for ids in (eos, [eos, 63]):
        output = decoder().generate(PROMPT, max_new_tokens=40, eos_token_id=ids)
        assert output.token_ids == [NEW[:count]]
        assert output.finish_reasons == ["eos"]
        ends_well(output, count)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_end_at_different_times(drafter):
    prompts, eos = [PROMPT, *ragged(3)], [NEW[4], NEW[11]]
    right = [plain(TARGET, prompt, 20, eos_token_id=eos) for prompt in prompts]
    assert len({len(row) for row in right}) > 1, "the test needs rows that end at different times"
    output = decoder(drafter).generate(prompts, max_new_tokens=20, eos_token_id=eos)
    assert output.token_ids == right
    for row, reason in zip(right, output.finish_reasons, strict=True):
        assert reason == ("eos" if row[-1] in eos else "length")
    for row, statistics in zip(right, output.row_statistics, strict=True):
        assert statistics.new_tokens == len(row)


def test_an_end_of_text_that_is_drafted_last_gets_no_bonus():
    """EOS is the last drafted token and everything is accepted."""
    eos = NEW[4]
    output = decoder(length=4).generate(PROMPT, max_new_tokens=20, eos_token_id=eos)
    assert output.token_ids == [NEW[:5]]
    assert output.rounds[0].accepted == [4]
    assert output.rounds[0].committed == [4]


def test_an_end_of_text_that_is_the_bonus_stays():
    output = decoder(length=3).generate(PROMPT, max_new_tokens=20, eos_token_id=NEW[4])
    assert output.token_ids == [NEW[:5]]
    assert output.rounds[0].accepted == [3]
    assert output.rounds[0].committed == [4]


def test_a_rejected_end_of_text_ends_nothing():
    eos = next(token for token in range(64) if token not in NEW)
    drafter = Scripted(draft=lambda row, text, limit: ([eos], [ROOT]))
    output = SpeculativeDecoder(TARGET, drafter).generate(
        PROMPT, max_new_tokens=20, eos_token_id=eos
    )
    assert output.token_ids == [NEW[:20]]
    assert output.statistics.accepted == 0
    assert output.finish_reasons == ["length"]


def test_end_of_text_on_a_side_branch_of_a_tree():
    eos = NEW[9]
    drafter = random_trees([PROMPT + NEW], seed=2)
    output = SpeculativeDecoder(TARGET, drafter).generate(
        PROMPT, max_new_tokens=40, eos_token_id=eos
    )
    assert output.token_ids == [NEW[: NEW.index(eos) + 1]]


def test_nothing_is_drafted_behind_an_end_of_text():
    output = decoder(length=8).generate(PROMPT, max_new_tokens=30, eos_token_id=NEW[3])
    assert output.rounds[0].draft_length == [3]
    assert output.rounds[0].cut == [True]


def test_no_end_of_text_configured():
    prompt = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    with_ngrams = SpeculativeDecoder(TARGET, NgramDrafter(num_tokens=3))
    assert TARGET.generation_config.eos_token_id is None
    output = with_ngrams.generate(prompt, max_new_tokens=15)
    assert output.token_ids == [plain(TARGET, prompt, 15)]


def test_the_models_own_end_of_text(monkeypatch):
    monkeypatch.setattr(TARGET.generation_config, "eos_token_id", [NEW[6], NEW[2]])
    assert decoder().generate(PROMPT, max_new_tokens=20).token_ids == [NEW[:3]]
    ignored = decoder().generate(PROMPT, max_new_tokens=20, eos_token_id=[])
    assert ignored.token_ids == [NEW[:20]], "[] asks for no end of text at all"
    monkeypatch.setattr(TARGET.generation_config, "eos_token_id", None)
    monkeypatch.setattr(TARGET.config, "eos_token_id", NEW[6])
    assert decoder().generate(PROMPT, max_new_tokens=20).token_ids == [NEW[:20]], "as transformers"


@pytest.mark.parametrize("drafter", ["twin", "ngram", "eagle2"])
def test_where_a_text_may_end_at_the_earliest(drafter):
    """On both sides of the place where the text would end by itself, inside a draft and at its root."""
    for place in (3, 7, 9):
        eos = NEW[place]
        for least in range(NEW.index(eos) - 1, NEW.index(eos) + 4):
            asked = {"eos_token_id": eos, "min_new_tokens": max(least, 0)}
            output = decoder(drafter).generate(PROMPT, max_new_tokens=14, **asked)
            assert output.token_ids == [plain(TARGET, PROMPT, 14, **asked)]


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_max_new_tokens_is_met_exactly(drafter):
    writer = decoder(drafter, length=5)
    for count in (1, 2, 3, 5, 12):
        output = writer.generate(PROMPT, max_new_tokens=count)
        assert output.token_ids == [NEW[:count]]
        assert output.finish_reasons == ["length"]
        ends_well(output, count)


def test_nothing_to_write():
    output = decoder().generate([PROMPT, [3]], max_new_tokens=0)
    assert output.token_ids == [[], []]
    assert output.finish_reasons == ["length", "length"]
    assert output.rounds == []
    assert output.statistics.tau == 0.0


def test_a_negative_length_is_refused():
    with pytest.raises(SpecdecError, match=r"generate\.max_new_tokens"):
        decoder().generate(PROMPT, max_new_tokens=-1)


# --- stopping criteria ----------------------------------------------------------------------------


class LastTokenIs(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token
        self.calls: list[list[int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids[0].tolist())
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("place", range(1, 20))
def test_a_criterion_at_every_place_of_a_block(place):
    right = plain(TARGET, PROMPT, 40, stopping_criteria=[LastTokenIs(NEW[place])])
    output = decoder().generate(
        PROMPT, max_new_tokens=40, stopping_criteria=[LastTokenIs(NEW[place])]
    )
    assert output.token_ids == [right]
    assert output.finish_reasons == ["stop"]
    ends_well(output, len(right))


def test_a_criterion_is_called_once_for_every_token():
    seen = LastTokenIs(-1)
    decoder("autoregressive").generate(PROMPT, max_new_tokens=20, stopping_criteria=[seen])
    assert seen.calls == [PROMPT + NEW[: count + 1] for count in range(20)]


def test_criteria_of_a_batch_see_one_row_at_a_time():
    prompts = [PROMPT, *ragged(2)]
    right = [
        plain(TARGET, prompt, 16, stopping_criteria=[LastTokenIs(NEW[5])]) for prompt in prompts
    ]
    output = decoder().generate(prompts, max_new_tokens=16, stopping_criteria=[LastTokenIs(NEW[5])])
    assert output.token_ids == right


def test_transformers_own_criteria():
    output = decoder().generate(PROMPT, max_new_tokens=16, stopping_criteria=[MaxTimeCriteria(0.0)])
    assert output.token_ids == [NEW[:1]]
    assert output.finish_reasons == ["stop"]


@pytest.mark.parametrize(("length", "reason", "count"), [(3, "stop", 3), (7, "length", 5)])
def test_which_of_two_ends_comes_first(length, reason, count):
    """A block holds both a stop and the length limit: the nearer one counts."""
    criterion = LastTokenIs(NEW[length - 1])
    output = decoder().generate(PROMPT, max_new_tokens=5, stopping_criteria=[criterion])
    assert output.token_ids == [NEW[:count]]
    assert output.finish_reasons == [reason]


def test_end_of_text_comes_before_the_length():
    output = decoder().generate(PROMPT, max_new_tokens=5, eos_token_id=NEW[4])
    assert output.finish_reasons == ["eos"]


def test_rules_are_checked_token_by_token():
    rules = StopRules([4], eos=[7])
    prefix = torch.tensor([1, 2])
    assert rules.cut(0, 1, prefix, [5, 7, 6]) == (2, "eos")
    assert rules.cut(0, 2, prefix, [5, 6, 7]) == (2, "length")
    assert rules.cut(0, 0, prefix, [5, 6]) == (2, None)


# --- stop strings ---------------------------------------------------------------------------------

WIDE, TOKENIZER = speaking_llama()
TEXT_PROMPT = "the cat sat"
TEXT_IDS = TOKENIZER(TEXT_PROMPT)["input_ids"]
WRITTEN = plain(WIDE, TEXT_IDS, 30)


def strings() -> list[str]:
    """Stop strings of one, two and three tokens, whole and cut inside a token."""
    pieces = [TOKENIZER.decode([token]) for token in WRITTEN]
    found = []
    for start in (2, 5, 9, 14):
        for count in (1, 2, 3):
            whole = "".join(pieces[start : start + count])
            found += [whole, whole[:-1], whole[1:]]
    return sorted({text for text in found if text.strip() and "\ufffd" not in text})


@pytest.mark.parametrize("stop", strings())
def test_stop_strings_across_tokens_and_rounds(stop):
    right = plain(WIDE, TEXT_IDS, 30, stop_strings=[stop], tokenizer=TOKENIZER)
    for eps in (0.0, 0.05):
        writer = SpeculativeDecoder(
            WIDE, autoregressive(WIDE, eps), FixedPolicy(length=4), tokenizer=TOKENIZER
        )
        output = writer.generate(TEXT_PROMPT, max_new_tokens=30, stop=stop, output_scores=True)
        assert output.token_ids == [right]
        assert output.finish_reasons == [
            "stop" if len(right) < 30 or stop in TOKENIZER.decode(right) else "length"
        ]
        assert len(output.scores[0]) == len(right)
        stream = writer.stream(TEXT_PROMPT, max_new_tokens=30, stop=[stop, "never written"])
        assert "".join(stream) == output.text
        assert stream.output.token_ids == [right]


def test_stop_strings_as_a_criterion():
    criterion = StopStringCriteria(TOKENIZER, strings()[0])
    ids = torch.tensor([TEXT_IDS])
    right = WIDE.generate(ids, stopping_criteria=[criterion], max_new_tokens=30, do_sample=False)
    writer = SpeculativeDecoder(WIDE, autoregressive(WIDE))
    ours = WIDE.generate(
        ids, stopping_criteria=[criterion], max_new_tokens=30, custom_generate=writer
    )
    assert torch.equal(ours, right)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(SpecdecError, match="tokenizer"):
        decoder().generate(PROMPT, max_new_tokens=5, stop="x")


def test_what_is_streamed_ends_where_the_text_ends(capsys):
    writer = SpeculativeDecoder(
        WIDE, autoregressive(WIDE, 0.0), FixedPolicy(length=8), tokenizer=TOKENIZER
    )
    streamer = TextStreamer(TOKENIZER, skip_prompt=True)
    output = writer.generate(
        TEXT_PROMPT, max_new_tokens=30, streamer=streamer, eos_token_id=WRITTEN[6]
    )
    assert len(output.token_ids[0]) == WRITTEN.index(WRITTEN[6]) + 1
    assert capsys.readouterr().out.rstrip("\n") == output.text
