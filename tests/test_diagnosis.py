"""The arithmetic of speed-ups, the sentences made of it, and turning drafting off."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from specdec.auto_off import AutoOff
from specdec.decoder import SpeculativeDecoder
from specdec.diagnosis import Diagnosis, break_even_alpha, expected_tokens, predicted_speedup
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.metrics import RoundRecord
from specdec.policies import FixedPolicy
from tests.drafters import DRAFTERS
from tests.tiny import PROMPT, llama, plain, ragged


@pytest.mark.parametrize(
    ("alpha", "length", "speedup"),
    [(0.3, 1, 1.182), (0.3, 10, 0.714), (0.6, 3, 1.674), (0.8, 6, 2.470), (0.9, 10, 3.431)],
)
def test_the_formula_gives_the_published_figures(alpha: float, length: int, speedup: float) -> None:
    # Goodput of speculative decoding at a draft cost of 0.1, from the field's literature.
    found = predicted_speedup(expected_tokens(alpha, length), length, 0.1)
    assert found == pytest.approx(speedup, abs=5e-4)


def test_expected_tokens_are_those_of_a_simulation() -> None:
    draws = torch.rand(200_000, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    accepted = draws.long().cumprod(1).sum(1)
    assert expected_tokens(0.7, 5) == pytest.approx(1 + accepted.float().mean().item(), abs=0.01)
    assert expected_tokens(1.0, 5) == 6


@pytest.mark.parametrize(("length", "c", "check"), [(1, 0.2, 1.0), (5, 0.21, 1.0), (4, 0.3, 1.3)])
def test_at_the_break_even_drafting_neither_pays_nor_costs(
    length: int, c: float, check: float
) -> None:
    alpha = break_even_alpha(length, c, check)
    assert alpha is not None
    assert predicted_speedup(expected_tokens(alpha, length), length, c, check) == pytest.approx(1)


def test_a_step_as_dear_as_a_target_pass_never_pays() -> None:
    assert break_even_alpha(5, 1.0) is None
    assert break_even_alpha(5, 1.2) is None


def test_a_slow_row_is_told_why() -> None:
    costs = {"draft": 1.05, "verify": 1.0, "other": 1.26, "plain": 1.0}
    slow = Diagnosis(alpha=0.31, tau=1.4, length=5, **costs)
    assert slow.sentence() == (
        "slower than plain decoding: α 0.31 is below the break-even 0.52 at c = 0.21; "
        "38% of the time is outside the models"
    )
    dear = Diagnosis(alpha=0.9, tau=3.0, length=3, draft=3.6, verify=1.3, other=0.0, plain=1.0)
    assert "c = 1.20 target passes, too much for any α" in dear.sentence()
    assert "checking a draft costs 1.30 target passes" in dear.sentence()


def test_a_fast_row_is_told_what_was_predicted() -> None:
    fast = Diagnosis(alpha=0.8, tau=3.0, length=4, draft=0.4, verify=1.1, other=0.0, plain=1.0)
    assert not fast.slow
    assert fast.sentence() == (
        "2.00 times as fast as plain decoding; τ 3.00 at c = 0.10 predicts 2.14"
    )


class Sleeping(AutoregressiveDrafter):
    """So slow that no load of the machine can make it pay."""

    def following(self, tokens: Tensor, depth: int) -> Tensor:
        time.sleep(0.1)
        return super().following(tokens, depth)


def test_statistics_say_when_drafting_does_not_pay() -> None:
    target = llama()
    decoder = SpeculativeDecoder(target, Sleeping(model=target), FixedPolicy(length=4))
    slow = decoder.generate(PROMPT, max_new_tokens=64).statistics.diagnosis
    assert slow is not None
    assert slow.startswith("slower than plain decoding: ")
    alone = SpeculativeDecoder(target).generate(PROMPT, max_new_tokens=64)
    assert alone.statistics.diagnosis is None


# --- auto_off -------------------------------------------------------------------------------------


def record(committed: int, drafted: int, seconds: float, draft: float = 0.0) -> RoundRecord:
    return RoundRecord(
        index=0, rows=[0], drafted=[drafted], draft_length=[drafted], accepted=[committed - 1],
        committed=[committed], cut=[False], draft_seconds=draft, verify_seconds=seconds - draft,
        seconds=seconds, tokens=[[0] * committed],
    )  # fmt: skip


def rounds_until(auto: AutoOff, drafts: bool, one: RoundRecord, most: int = 500) -> int:
    for count in range(most):
        if auto.drafts(0) == drafts:
            return count
        auto.observe(one)
    raise AssertionError(f"still the same after {most} rounds")


def test_drafts_that_do_not_pay_are_paused_ever_longer() -> None:
    auto = AutoOff(rounds=4, rows=1)
    wasted, alone = record(1, 5, seconds=2.0, draft=1.0), record(1, 0, seconds=1.0)
    for pause in (4, 8, 16, 32, 64, 64):
        assert rounds_until(auto, False, wasted) == 4
        assert rounds_until(auto, True, alone) == pause


def test_drafts_that_pay_go_on_and_are_forgiven() -> None:
    auto = AutoOff(rounds=4, rows=1)
    wasted, alone = record(1, 5, seconds=2.0, draft=1.0), record(1, 0, seconds=1.0)
    good = record(4, 5, seconds=2.0, draft=1.0)
    for pause in (4, 8):
        rounds_until(auto, False, wasted)
        assert rounds_until(auto, True, alone) == pause
    for _ in range(50):
        auto.observe(good)
        assert auto.drafts(0)
    rounds_until(auto, False, wasted)
    assert rounds_until(auto, True, alone) == 4


def test_the_cost_of_a_draft_is_measured_against_plain_rounds() -> None:
    # 1.5 tokens a round of 1.4 pass for paying until a plain round turns out to take half of it.
    auto = AutoOff(rounds=2, rows=1)
    round_ = record(2, 2, seconds=1.4, draft=0.2)
    for _ in range(10):
        auto.observe(round_)
    assert auto.drafts(0)
    auto.observe(record(1, 0, seconds=0.5))
    assert rounds_until(auto, False, round_) <= 2


@pytest.mark.filterwarnings("ignore:The drafter hardly helps")
def test_a_useless_drafter_is_turned_off_and_tried_again() -> None:
    target = llama()
    decoder = SpeculativeDecoder(target, DRAFTERS["stranger"](target), FixedPolicy(length=4))
    for _ in range(2):  # what one generation learned is not kept for the next
        output = decoder.generate(PROMPT, max_new_tokens=120, auto_off=4)
        assert output.token_ids[0] == plain(target, PROMPT, 120)
        lengths = [record.draft_length[0] for record in output.rounds]
        assert lengths[:9] == [4, 4, 4, 4, 0, 0, 0, 0, 4]
        assert lengths[9:12] == [4, 4, 4]
        assert lengths[12:20] == [0] * 8


@pytest.mark.filterwarnings("ignore:The drafter hardly helps")
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_turning_off_changes_no_text(drafter: str) -> None:
    target = llama()
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), FixedPolicy(length=4))
    prompts = ragged(3)
    output = decoder.generate(prompts, max_new_tokens=40, auto_off=2)
    assert output.token_ids == [plain(target, prompt, 40) for prompt in prompts]


def test_rows_are_turned_off_one_by_one() -> None:
    auto = AutoOff(rounds=2, rows=2)
    both = RoundRecord(
        index=0, rows=[0, 1], drafted=[4, 4], draft_length=[4, 4], accepted=[0, 4], committed=[1, 5],
        cut=[False, False], draft_seconds=1.0, verify_seconds=1.0, seconds=2.0,
        tokens=[[0], [0] * 5],
    )  # fmt: skip
    auto.observe(both)
    auto.observe(both)
    assert [auto.drafts(row) for row in (0, 1)] == [False, True]
