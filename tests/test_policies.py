"""The length policies: their rules on numbers worked out by hand, and in real generations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import PreTrainedModel

from specdec import SpecdecError, SpeculativeDecoder, config
from specdec.draft import DraftStep, RoundOutcome
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.plugins import make_policy
from specdec.policies import (
    ConfidencePolicy,
    FixedPolicy,
    HeuristicPolicy,
    LengthPolicy,
    SVIPPolicy,
)
from tests.drafters import autoregressive
from tests.tiny import PROMPT, architecture, llama, noisy, plain, ragged

TARGET = architecture("llama")


def step(*distributions: list[float], depth: int = 1, rows: list[int] | None = None) -> DraftStep:
    """One level of a chain: a row for each distribution (a list of probabilities)."""
    width = max(map(len, distributions))
    padded = [[*probs, *[0.0] * (width - len(probs))] for probs in distributions]
    logits = torch.tensor(padded).log()[:, None]
    tokens = torch.zeros(len(padded), 1, dtype=torch.long)
    return DraftStep(
        depth=depth,
        tokens=tokens,
        distributions=logits,
        path_log_prob=torch.zeros(tokens.shape),
        rows=list(range(len(padded))) if rows is None else rows,
        active=torch.ones_like(tokens, dtype=torch.bool),
    )


def outcome(
    accepted: list[int],
    drafted: list[int],
    rows: list[int] | None = None,
    cut: list[bool] | None = None,
) -> RoundOutcome:
    return RoundOutcome(
        rows=list(range(len(accepted))) if rows is None else rows,
        tokens=[[0] * (count + 1) for count in accepted],
        accepted=accepted,
        drafted=drafted,
        draft_length=drafted,
        cut=cut or [False] * len(accepted),
        path=torch.zeros(len(accepted), 1, dtype=torch.long),
        path_nodes=[[0]] * len(accepted),
    )


def asked(policy: LengthPolicy, at: DraftStep) -> list[list[bool]]:
    answer = torch.as_tensor(policy.keep_drafting(at))
    return answer.expand(at.tokens.shape).tolist()


# --- rules ----------------------------------------------------------------------------------------


def test_fixed():
    policy = FixedPolicy(length=3)
    answers = [policy.keep_drafting(step([1.0], depth=depth)) for depth in (1, 2, 3, 4)]
    assert answers == [True, True, False, False]


@pytest.mark.parametrize(
    ("probs", "bound", "goes_on"),
    [
        ([0.25] * 4, 0.4560, False),
        ([0.9, 0.1], 0.2208, True),
        ([0.7, 0.2, 0.1], 0.3468, False),
        ([0.5, 0.5], 0.3224, False),
        ([1.0], 0.0, True),
    ],
)
def test_svip(probs, bound, goes_on):
    at = step(probs)
    assert (0.15 * at.entropy).sqrt().item() == pytest.approx(bound, abs=5e-5)
    assert asked(SVIPPolicy(), at) == [[goes_on]]
    # The same bound against thresholds on its two sides.
    if bound:
        assert asked(SVIPPolicy(threshold=bound + 1e-3), at) == [[True]]
        assert asked(SVIPPolicy(threshold=bound - 1e-3), at) == [[False]]


def test_svip_has_a_longest_draft():
    assert SVIPPolicy(max_length=4).keep_drafting(step([1.0], depth=4)) is False
    assert SVIPPolicy().params.max_length == 40


def test_svip_counts_tokens_that_cannot_be_drawn_as_nothing():
    at = step([0.9, 0.1], [0.9, 0.1, 0.0, 0.0])
    assert at.entropy[0] == at.entropy[1]


def test_confidence():
    policy = ConfidencePolicy(threshold=0.4, max_length=3)
    assert asked(policy, step([0.41, 0.59], [0.39, 0.35, 0.26], [1.0])) == [[True], [False], [True]]
    assert policy.keep_drafting(step([1.0], depth=3)) is False


def test_heuristic():
    policy = HeuristicPolicy(initial=5)
    policy.start(1)
    lengths = []
    for accepted in (5, 3, 6, 0):
        drafted = policy.lengths[0]
        policy.observe(outcome([accepted], [drafted]))
        lengths.append(policy.lengths[0])
    assert lengths == [7, 6, 8, 7]


def test_heuristic_stays_between_one_and_the_longest():
    policy = HeuristicPolicy(initial=2, max_length=5)
    policy.start(2)
    for _ in range(4):
        policy.observe(outcome([0, 9], [2, 9]))
    assert policy.lengths == [1, 5]
    assert HeuristicPolicy(initial=9, max_length=4).params.initial == 9
    capped = HeuristicPolicy(initial=9, max_length=4)
    capped.start(1)
    assert capped.lengths == [4]


def test_heuristic_learns_nothing_from_a_draft_that_was_cut():
    policy = HeuristicPolicy(initial=5)
    policy.start(3)
    policy.observe(outcome([2, 0, 0], [2, 2, 0], cut=[True, True, False]))
    assert policy.lengths == [5, 5, 5]


def test_heuristic_knows_rows_by_their_first_place():
    policy = HeuristicPolicy(initial=2)
    policy.start(4)
    policy.observe(outcome([2, 0], [2, 2], rows=[1, 3]))
    assert policy.lengths == [2, 4, 2, 1]
    at = step([1.0], [1.0], depth=2, rows=[1, 3])
    assert asked(policy, at) == [[True], [False]]


def test_branches_are_asked_one_by_one():
    """On a tree, siblings share the distribution that they came from."""
    logits = torch.tensor([[[0.95, 0.05], [0.5, 0.5]]]).log()
    tree = DraftStep(
        depth=2,
        tokens=torch.tensor([[0, 1, 0]]),
        distributions=logits,
        path_log_prob=torch.zeros(1, 3),
        rows=[0],
        active=torch.ones(1, 3, dtype=torch.bool),
        source=torch.tensor([[1, 0, 0]]),
    )
    assert asked(SVIPPolicy(), tree) == [[False, True, True]]
    assert asked(ConfidencePolicy(threshold=0.6), tree) == [[False, True, True]]
    assert asked(FixedPolicy(length=2), tree) == [[False] * 3]
    heuristic = HeuristicPolicy(initial=3)
    heuristic.start(1)
    assert asked(heuristic, tree) == [[True] * 3]


@pytest.mark.parametrize(
    ("cls", "parameters"),
    [
        (FixedPolicy, {"length": 0}),
        (FixedPolicy, {"lenght": 3}),
        (HeuristicPolicy, {"initial": 0}),
        (SVIPPolicy, {"threshold": 0}),
        (SVIPPolicy, {"scale": -1}),
        (ConfidencePolicy, {"threshold": 1.5}),
        (ConfidencePolicy, {"max_length": "many"}),
    ],
)
def test_impossible_parameters(cls, parameters):
    with pytest.raises(SpecdecError, match=rf"{cls.__name__}\.{next(iter(parameters))}"):
        cls(**parameters)


# --- in a generation ------------------------------------------------------------------------------


def distributions(drafter: PreTrainedModel, text: list[int], drafted: list[int]) -> torch.Tensor:
    """`[D, V]` what the drafter drew each drafted token from."""
    with torch.no_grad():
        logits = drafter(torch.tensor([text + drafted])).logits[0, len(text) - 1 : -1]
    return logits.softmax(-1)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 25.0, "seed": 1}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", ["svip", "confidence"])
def test_drafts_end_where_the_rule_says(name, settings):
    """At the drafter's untempered distribution, whatever the temperature of the text."""
    blunt = llama()
    blunt.lm_head.weight.data *= 0.1
    svip, confidence = SVIPPolicy(threshold=0.35), ConfidencePolicy(threshold=0.6)
    policy = {"svip": svip, "confidence": confidence}[name]

    def goes_on(probs: torch.Tensor) -> torch.Tensor:
        if name == "confidence":
            return probs.amax(-1) >= 0.6
        return (-0.15 * torch.special.xlogy(probs, probs).sum(-1)).sqrt() <= 0.35

    decoder = SpeculativeDecoder(TARGET, AutoregressiveDrafter(model=blunt), policy)
    output = decoder.generate(PROMPT, max_new_tokens=30, keep_trees=True, **settings)
    text = PROMPT + output.token_ids[0][:1]
    lengths = []
    for record in output.rounds:
        drafted = record.tree["tokens"][0]
        if drafted:
            answers = goes_on(distributions(blunt, text, drafted)).tolist()
            assert all(answers[:-1])
            assert not answers[-1] or record.cut[0] or len(drafted) == 20
            lengths.append(len(drafted))
        text = text + record.tokens[0]
    assert len(set(lengths)) > 1, "the test needs drafts of several lengths"


def test_heuristic_grows_and_is_not_fooled_by_the_end():
    decoder = SpeculativeDecoder(TARGET, autoregressive(TARGET, eps=0), HeuristicPolicy(initial=2))
    output = decoder.generate(PROMPT, max_new_tokens=30)
    assert [record.draft_length[0] for record in output.rounds] == [2, 4, 6, 8, 4]
    assert [record.cut[0] for record in output.rounds] == [False] * 4 + [True]


def test_heuristic_shrinks_row_by_row():
    stranger = noisy(TARGET, 30.0)
    drafter = AutoregressiveDrafter(model=stranger)
    decoder = SpeculativeDecoder(TARGET, drafter, HeuristicPolicy(initial=4))
    output = decoder.generate(ragged(2), max_new_tokens=12)
    for place in (0, 1):
        lengths = [record.draft_length[place] for record in output.rounds if len(record.rows) == 2]
        assert lengths[:4] == [4, 3, 2, 1]


class Recording(LengthPolicy):
    """Goes on twice, and writes down what it was shown."""

    def start(self, batch_size: int) -> None:
        self.started = batch_size
        self.steps: list[DraftStep] = []
        self.outcomes: list[RoundOutcome] = []

    def keep_drafting(self, step: DraftStep) -> bool:
        self.steps.append(step)
        return step.depth < 2

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


def test_what_a_policy_sees(monkeypatch):
    seen: list[Recording] = []
    monkeypatch.setattr(copy, "copy", lambda value, copied=copy.copy: _note(copied(value), seen))
    policy = Recording()
    decoder = SpeculativeDecoder(TARGET, autoregressive(TARGET), policy)
    output = decoder.generate(ragged(3), max_new_tokens=9)
    assert not vars(policy).keys() & {"started", "steps", "outcomes"}, "it works on a copy"
    worked = next(each for each in seen if isinstance(each, Recording))
    assert worked.started == 3
    assert [each.tokens for each in worked.outcomes] == [record.tokens for record in output.rounds]
    for at in worked.steps:
        assert at.depth in (1, 2)
        assert at.tokens.shape == (len(at.rows), 1)
        assert at.logits.shape == (len(at.rows), 1, 64)
        assert torch.equal(at.logits.argmax(-1), at.tokens), "greedy drafts the best token"
        best = at.log_probs.amax(-1)
        assert torch.allclose(at.top_prob, best.exp())
        if at.depth == 1:
            assert torch.allclose(at.path_log_prob, best, atol=1e-5)
        assert (at.entropy >= 0).all()
        assert (at.entropy <= math.log(64) + 1e-5).all()


def _note(value, seen):
    seen.append(value)
    return value


def test_two_generations_of_one_policy():
    policy = HeuristicPolicy(initial=2)
    decoder = SpeculativeDecoder(TARGET, autoregressive(TARGET, eps=0), policy)
    for _ in range(2):
        output = decoder.generate(PROMPT, max_new_tokens=16)
        assert output.rounds[0].draft_length == [2]
        assert output.token_ids == [plain(TARGET, PROMPT, 16)]


def test_the_oracle_is_for_benchmarks_only(tmp_path):
    with pytest.raises(SpecdecError, match=r"policy.name: 'oracle' .* in 'specdec bench' only"):
        config.read({"drafter": "ngram", "policy": "oracle"})
    with pytest.raises(SpecdecError, match=r"'oracle' is for analysis"):
        SpeculativeDecoder(llama(), "ngram", "oracle")
    path = tmp_path / "config.yaml"
    path.write_text("drafter: ngram\npolicy: oracle\n")
    with pytest.raises(SpecdecError, match=r"config.yaml:2: policy.name: 'oracle'"):
        config.read(path)
    assert make_policy("oracle", analysis=True).params.max_length == 20
