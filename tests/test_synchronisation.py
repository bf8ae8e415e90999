"""The host waits for the device once a round: on an accelerator that is not there (`accelerator`)."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specdec import Drafter, LengthPolicy, SpeculativeDecoder
from specdec.draft import DraftStep
from specdec.host import HostReads
from specdec.policies import FixedPolicy, HeuristicPolicy, SVIPPolicy
from tests import accelerator
from tests.drafters import DRAFTERS, eagle2
from tests.tiny import llama, ragged

pytestmark = pytest.mark.skipif(
    not accelerator.available(), reason="this torch has no such devices"
)

SETTLE = ("_round", "_settle", "read")
"""Where a round reads what was accepted."""
DECIDE = ("_round", "_draft", "_go_on", "_read_branches", "read")
"""Where it reads the answer of a policy that looks at the draft."""


class Peeking(LengthPolicy):
    """Decides on the host by looking at a drafted token: a wait at every step."""

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < 3 and int(step.tokens.sum()) >= 0


POLICIES: dict[str, LengthPolicy] = {
    "fixed": FixedPolicy(length=4),
    "heuristic": HeuristicPolicy(initial=3),
    "svip": SVIPPolicy(threshold=0.3, max_length=6),
    "peeking": Peeking(),
}
VARYING = ["heuristic", "svip", "peeking"]
SAMPLING = {
    "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
    "min_new_tokens": 4, "eos_token_id": [7, 8], "seed": 0,
}  # fmt: skip
KINDS = {name: make for name, make in DRAFTERS.items() if name not in ("twin", "stranger")}
KINDS["eagle2_sample"] = lambda target: eagle2(target, sample=True)
CASES: list[tuple[str, str, bool]] = [
    *((drafter, "fixed", False) for drafter in KINDS),
    *((drafter, "fixed", True) for drafter in ("autoregressive", "eagle2_sample", "cape_glide")),
    *((name, policy, False) for name in ("autoregressive", "eagle2") for policy in VARYING),
]


@dataclass
class Measured:
    """What a generation on the accelerator did, next to the same one on the CPU."""

    waits: Counter[tuple[str, ...]]
    rounds: int
    steps: int
    reads: int
    tokens: list[list[int]]
    expected: list[list[int]]

    @property
    def in_rounds(self) -> Counter[tuple[str, ...]]:
        return Counter({wait: count for wait, count in self.waits.items() if wait[0] == "_round"})


def measure(case: tuple[str, str, bool]) -> Measured:
    name, policy, sample = case
    settings: dict[str, Any] = {"max_new_tokens": 8} | (SAMPLING if sample else {})
    target = llama()
    drafter = KINDS[name](target)
    decoder = SpeculativeDecoder(target, drafter, POLICIES[policy])
    expected = decoder.generate(ragged(2), **settings).token_ids
    with accelerator.pretended() as mode:
        for module in modules(target, drafter):
            accelerator.move(module)
        decoder = SpeculativeDecoder(target, drafter, POLICIES[policy])
        decoder.generate(ragged(2), max_new_tokens=3)
        mode.waits.clear()
        HostReads.count = 0
        out = decoder.generate(ragged(2), **settings)
    return Measured(
        waits=Counter(tuple(wait[wait.index("run") + 1 :]) for wait in mode.waits if "run" in wait),
        rounds=len(out.rounds),
        steps=sum(max(each.draft_length) for each in out.rounds),
        reads=HostReads.count,
        tokens=out.token_ids,
        expected=expected,
    )


def modules(target: torch.nn.Module, drafter: Drafter) -> list[torch.nn.Module]:
    """The target, and whatever models the drafter and its base were given."""
    found, each = [target], drafter
    while each is not None:
        for name in ("model", "checkpoint"):
            part = getattr(each.params, name, None)
            if isinstance(part, torch.nn.Module):
                found.append(part)
        each = getattr(each, "base", None)
    return found


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str, bool], Measured]:
    """All cases, in a process of their own: torch never forgets a device."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return dict(zip(CASES, pool.map(measure, CASES), strict=True))


Results = dict[tuple[str, str, bool], Measured]


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "fixed"], ids=str)
def test_a_round_waits_once(measured: Results, case: tuple[str, str, bool]) -> None:
    found = measured[case]
    waits = found.in_rounds
    if case[0] == "ngram":
        # Whether there is a match decides whether there is a draft at all.
        assert 0 < waits.pop(("_round", "_draft", "begin", "read")) <= found.rounds
    assert waits == {SETTLE: found.rounds}


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2"])
def test_what_a_policy_costs(measured: Results, drafter: str) -> None:
    """An answer known on the host is free; one that depends on the draft is read once a step."""
    heuristic, svip = measured[drafter, "heuristic", False], measured[drafter, "svip", False]
    assert heuristic.in_rounds == {SETTLE: heuristic.rounds}
    assert svip.in_rounds.pop(SETTLE) == svip.rounds
    assert 0 < svip.in_rounds[DECIDE] <= svip.steps


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2"])
def test_a_wait_that_goes_another_way_is_noticed(measured: Results, drafter: str) -> None:
    found = measured[drafter, "peeking", False]
    assert sum(found.in_rounds.values()) > found.rounds


@pytest.mark.parametrize("drafter", KINDS)
def test_the_texts_are_those_of_the_cpu(measured: Results, drafter: str) -> None:
    """On an accelerator some things are done in another way, to wait less."""
    found = measured[drafter, "fixed", False]
    assert found.tokens == found.expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_that_is_read_goes_through_one_door(
    measured: Results, case: tuple[str, str, bool]
) -> None:
    found = measured[case]
    if case[1] == "peeking":
        assert sum(found.waits.values()) > found.reads
    else:
        assert sum(found.waits.values()) == found.reads
