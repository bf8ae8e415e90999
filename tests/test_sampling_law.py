"""Sampling is lossless: every drafter, policy and setting writes with the target's own law.

The last part breaks the rules on purpose, one by one: the same check must notice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor

from specdec import Drafter, LengthPolicy, SpeculativeDecoder, verification
from specdec.draft import DraftStep, DraftTree
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.vocab import DraftVocabulary
from specdec.generation import GenerationSettings
from specdec.plugins import registry
from specdec.policies import FixedPolicy
from specdec.sampling import Sampler
from tests.law import PROMPT, assert_lossless, check, tiny_llama
from tests.scripted import ScriptedDrafter
from tests.tiny import noisy

VOCAB = 6
TARGET = tiny_llama(VOCAB, seed=3)
NEAR = noisy(TARGET, eps=0.4)
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))


class Wanderer(LogitsProcessor):
    """A user's own processor that reads the whole prefix: its sum says which token is favoured."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = input_ids.sum(1) % scores.shape[-1]
        return scores + 2.0 * torch.nn.functional.one_hot(favoured, scores.shape[-1])


class Superstitious(LengthPolicy):
    """Stops behind odd tokens: a decision about a drawn token that leaves the token in the draft."""

    def keep_drafting(self, step: DraftStep) -> Tensor:
        return (step.tokens % 2 == 0) & (step.depth < 4)


def near(**parameters: Any) -> Drafter:
    return AutoregressiveDrafter(model=NEAR, **parameters)


def tree(sampled: int = 0, fixed: int = 0, depth: int = 3) -> Drafter:
    return ScriptedDrafter(table=TABLE, sampled=sampled, fixed=fixed, depth=depth)


def decoder(drafter: Any, policy: Any = None) -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, drafter, policy or FixedPolicy(length=4))


DRAFTERS: dict[str, Callable[[], Drafter | str]] = {
    "autoregressive": near,
    "ngram": lambda: "ngram",
    "tree": lambda: tree(sampled=2, fixed=1, depth=2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5},
    "temperature 0.6, top_k 4": {"temperature": 0.6, "top_k": 4},
    "top_k 2": {"top_k": 2},
    "temperature 0.8, top_p 0.7": {"temperature": 0.8, "top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 2, "eos_token_id": [2, 4]},
    "end of text": {"eos_token_id": 3},
    "bad_words_ids": {"bad_words_ids": [[3], [4, 1], [2, 5, 0]]},
    "suppress_tokens": {"suppress_tokens": [1, 4]},
    "a user's processor": {"processors": [Wanderer()]},
    "all at once": {
        "temperature": 1.3, "top_k": 4, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3, "min_new_tokens": 2, "eos_token_id": 5,
        "bad_words_ids": [[1, 2]], "processors": [Wanderer()],
    },
}  # fmt: skip


@pytest.mark.parametrize("drafter", ["autoregressive", "tree"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(drafter: str, setting: str) -> None:
    assert_lossless(decoder(DRAFTERS[drafter]()), **SETTINGS[setting])


@pytest.mark.parametrize("setting", ["temperature 0.5", "top_k 2", "end of text", "all at once"])
def test_ngram_drafts(setting: str) -> None:
    """Point masses have no distribution of their own that a setting could change."""
    assert_lossless(decoder("ngram"), **SETTINGS[setting])


POLICIES = {
    name: entry for name, entry in registry().entries["policy"].items()
    if not entry.load().analysis_only
}  # fmt: skip
VARYING = {"svip": {"threshold": 0.42}, "confidence": {"threshold": 0.45}}
"""Parameters with which a policy stops now here, now there in these flat distributions."""


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", [*POLICIES, "superstitious"])
def test_every_policy(drafter: str, policy: str) -> None:
    if policy == "superstitious":
        made: LengthPolicy = Superstitious()
    else:
        made = POLICIES[policy].load()(**VARYING.get(policy, {}))
    assert_lossless(decoder(DRAFTERS[drafter](), made), temperature=0.8, top_k=5)


@pytest.mark.parametrize("policy", VARYING)
def test_the_varying_policies_vary(policy: str) -> None:
    made = decoder(near(), POLICIES[policy].load()(**VARYING[policy]))
    out = made.generate([PROMPT] * 50, max_new_tokens=12, temperature=1.0, seed=0)
    lengths = [length for each in out.rounds for length in each.draft_length]
    assert len(set(lengths)) >= 4


@pytest.mark.parametrize("shape", [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (1, 3), (2, 2)])
def test_trees_of_sampled_and_fixed_children(shape: tuple[int, int]) -> None:
    sampled, fixed = shape
    made = tree(sampled, fixed, depth=3 if sampled + fixed < 4 else 2)
    assert_lossless(decoder(made), temperature=0.7)


@pytest.mark.parametrize("setting", ["top_k 2", "no_repeat_ngram_size", "bad_words_ids"])
def test_more_sampled_children_than_possible_tokens(setting: str) -> None:
    """What is left when no token has any probability was not drawn, and must not be accepted."""
    assert_lossless(decoder(tree(sampled=5, depth=1)), **SETTINGS[setting])


def test_a_draft_in_bfloat16() -> None:
    model = noisy(TARGET, eps=0.4).to(torch.bfloat16)
    assert_lossless(decoder(AutoregressiveDrafter(model=model)), temperature=0.7)


@pytest.mark.parametrize("vocab", [5, 8])
def test_a_draft_vocabulary_of_another_size(vocab: int) -> None:
    """As where only the padding of the embedding differs; the drafter's own ids are never drafted."""
    model = resized(NEAR, vocab)
    made = decoder(AutoregressiveDrafter(model=model))
    assert_lossless(made)
    assert_lossless(made, **SETTINGS["all at once"])


def resized(model: LlamaForCausalLM, vocab: int) -> LlamaForCausalLM:
    other = tiny_llama(vocab, seed=8)
    shared = min(vocab, model.config.vocab_size)
    state = other.state_dict()
    for name, weight in model.state_dict().items():
        if weight.shape == state[name].shape:
            state[name] = weight
        else:
            state[name][:shared] = weight[:shared]
    other.load_state_dict(state)
    return other


def test_a_reduced_draft_vocabulary() -> None:
    assert_lossless(decoder(near(draft_vocab=[4, 0, 2, 3])))
    assert_lossless(decoder(near(draft_vocab=[4, 0, 2, 3])), **SETTINGS["all at once"])


def test_a_draft_vocabulary_of_which_nothing_may_be_written() -> None:
    assert_lossless(decoder(near(draft_vocab=[4, 3])), suppress_tokens=[3, 4])


def test_a_drafter_whose_logits_overflow() -> None:
    model = noisy(TARGET, eps=0.4)
    model.lm_head.weight.data[2] = torch.inf
    assert_lossless(decoder(AutoregressiveDrafter(model=model)))


def test_drafting_that_is_turned_off_and_on_again() -> None:
    """Rows that draft and rows that do not, in one batch; when is a matter of measured times."""
    settings = GenerationSettings(auto_off=1)
    assert_lossless(SpeculativeDecoder(TARGET, near(), FixedPolicy(length=2), settings=settings))


# --- rules broken on purpose ----------------------------------------------------------------------


def skip_the_residual(patch: pytest.MonkeyPatch) -> Drafter:
    patch.setattr(verification, "_residual", lambda p, q: p)
    return near()


def drop_improbable_tokens(patch: pytest.MonkeyPatch) -> Drafter:
    """A drawn token, and all behind it, left out because its own probability is low."""
    finish = ChainDrafter.finish

    def selective(self: ChainDrafter) -> DraftTree:
        chain = finish(self)
        assert chain.proposals is not None
        own = chain.proposals.gather(2, chain.tokens[..., None])[..., 0]
        kept = (own >= 0.3).int().cumprod(1).bool()
        return dataclasses.replace(chain, valid=chain.valid & kept)

    patch.setattr(ChainDrafter, "finish", selective)
    return near()


def forget_the_temperature_of_the_draft(patch: pytest.MonkeyPatch) -> Drafter:
    """The draw is tempered, the reported distribution is not."""
    draw = DraftVocabulary.draw

    def raw(self: DraftVocabulary, logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens, _, picked = draw(self, logits, *args)
        return tokens, torch.softmax(self.expand(logits), dim=-1), picked

    patch.setattr(DraftVocabulary, "draw", raw)
    return near()


def take_the_best_for_a_draw(patch: pytest.MonkeyPatch) -> Drafter:
    """Greedy drafts that claim to be drawn from the drafter's distribution."""
    patch.setattr(Sampler, "draw", lambda self, scores: (scores.argmax(-1), scores.softmax(-1)))
    return near()


def skip_the_temperature_of_the_target(patch: pytest.MonkeyPatch) -> Drafter:
    choose = verification._choose
    patch.setattr(
        verification, "_choose",
        lambda tree, node, scores, sampler: choose(tree, node, scores * 0.6, sampler),
    )  # fmt: skip
    return near()


def no_renormalising_after_a_rejected_sibling(patch: pytest.MonkeyPatch) -> Drafter:
    patch.setattr(verification, "_residual", lambda p, q: (p - q).clamp_min(0))
    return tree(sampled=3)


def siblings_as_if_drawn_with_replacement(patch: pytest.MonkeyPatch) -> Drafter:
    patch.setattr(verification, "_normalise", without_touching_q(verification._normalise))
    return tree(sampled=3)


def without_touching_q(normalise: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def patched(weights: Tensor, otherwise: Tensor) -> Tensor:
        # `otherwise` is q itself where a sibling is taken out of it, and p for a residual.
        taken_out = (weights != otherwise).sum(-1).max() <= 1
        return otherwise if taken_out else normalise(weights, otherwise)

    return patched


def fixed_children_by_a_coin(patch: pytest.MonkeyPatch) -> Drafter:
    """A fixed child accepted with any other probability than its own."""

    def coin(children: Tensor, tokens: Tensor, token: Tensor) -> Tensor:
        hits = children & (torch.rand(tokens.shape) < 0.5)
        return (
            torch.where(hits.any(1), hits.int().argmax(1), -1) if tokens.numel() else token * 0 - 1
        )

    patch.setattr(verification, "_matching", coin)
    return tree(fixed=2)


def processors_without_the_drafted_tokens(patch: pytest.MonkeyPatch) -> Drafter:
    scores = Sampler.scores

    def blind(self: Sampler, logits: Tensor, state: Any, path: Tensor, *args: Any) -> Tensor:
        return scores(self, logits, state, path[:, :0], *args)

    patch.setattr(Sampler, "scores", blind)
    return near()


BROKEN: dict[Callable[[pytest.MonkeyPatch], Drafter], dict[str, Any]] = {
    skip_the_residual: {},
    drop_improbable_tokens: {},
    forget_the_temperature_of_the_draft: {"temperature": 0.5},
    take_the_best_for_a_draw: {},
    skip_the_temperature_of_the_target: {},
    no_renormalising_after_a_rejected_sibling: {},
    siblings_as_if_drawn_with_replacement: {},
    fixed_children_by_a_coin: {},
    processors_without_the_drafted_tokens: {"processors": [Wanderer()]},
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda rule: rule.__name__)
def test_the_check_notices_a_broken_rule(
    broken: Callable[[pytest.MonkeyPatch], Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(decoder(broken(monkeypatch)), **BROKEN[broken])
    assert min(each.p_value for each in found.values()) < 1e-9
