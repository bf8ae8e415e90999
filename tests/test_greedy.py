"""Greedy decoding writes what transformers' own `generate` writes, token for token, in float32."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import Phi3Config, PreTrainedModel

from specdec import SpeculativeDecoder
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.loop import Generation
from specdec.policies import FixedPolicy
from tests.drafters import DRAFTERS, POLICIES, autoregressive, random_trees
from tests.tiny import (
    ARCHITECTURES,
    PROMPT,
    architecture,
    build,
    left_padded,
    llama,
    noisy,
    plain,
    ragged,
)

NEW = 24


def random_prompt(length: int, seed: int = 5) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 64, (length,), generator=draw).tolist()


def wanted(
    target: PreTrainedModel, prompts: list[list[int]], count: int = NEW, **arguments: Any
) -> list[list[int]]:
    return [plain(target, prompt, count, **arguments) for prompt in prompts]


# --- every architecture ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chains_on_every_architecture(name):
    target, prompts = architecture(name), ragged(4)
    decoder = SpeculativeDecoder(target, autoregressive(target), "fixed")
    output = decoder.generate(prompts, max_new_tokens=NEW)
    assert output.token_ids == wanted(target, prompts)
    assert 0.2 < output.statistics.alpha < 0.95, "the test needs accepted and rejected drafts"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trees_on_every_architecture(name):
    target, prompts = architecture(name), ragged(4)
    right = wanted(target, prompts)
    texts = [prompt + new for prompt, new in zip(prompts, right, strict=True)]
    decoder = SpeculativeDecoder(target, random_trees(texts))
    output = decoder.generate(left_padded(prompts), max_new_tokens=NEW)
    assert output.token_ids == right
    assert 1.3 < output.statistics.tau < 3, "the test needs accepted and rejected drafts"


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_trees_that_are_deeper_than_the_window(name):
    config = copy.deepcopy(architecture(name).config)
    config.sliding_window = 2
    target, prompts = build(config, seed=3, sharpness=5.0), ragged(3)
    right = wanted(target, prompts)
    texts = [prompt + new for prompt, new in zip(prompts, right, strict=True)]
    output = SpeculativeDecoder(target, random_trees(texts)).generate(prompts, max_new_tokens=NEW)
    assert output.token_ids == right
    assert max(max(each.accepted) for each in output.rounds) >= 3


# --- every drafter with every policy --------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_with_every_policy(drafter, policy):
    target, prompts = architecture("llama"), ragged(3)
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), POLICIES[policy]())
    output = decoder.generate(prompts, max_new_tokens=16)
    assert output.token_ids == wanted(target, prompts, 16)
    assert output.finish_reasons == ["length"] * 3


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_row_writes_in_a_batch_what_it_writes_alone(drafter):
    target, prompts = architecture("llama"), ragged(3)
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), "svip")
    together = decoder.generate(prompts, max_new_tokens=12)
    for row, prompt in enumerate(prompts):
        alone = decoder.generate(prompt, max_new_tokens=12)
        assert alone.token_ids[0] == together.token_ids[row]
        for name in ("rounds", "drafted", "accepted"):
            together_, alone_ = together.row_statistics[row], alone.statistics
            assert getattr(together_, name) == getattr(alone_, name)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_every_draft_length(length, eps):
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, autoregressive(target, eps), FixedPolicy(length=length))
    output = decoder.generate(PROMPT, max_new_tokens=NEW)
    assert output.token_ids == wanted(target, [PROMPT])
    assert max(record.drafted[0] for record in output.rounds) <= length


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2", "glide", "ngram"])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_drafters_beside_other_targets(name, drafter):
    target, prompts = architecture(name), ragged(3)
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), "svip")
    assert decoder.generate(prompts, max_new_tokens=NEW).token_ids == wanted(target, prompts)


# --- processors -----------------------------------------------------------------------------------

BASE = plain(architecture("llama"), PROMPT, 40)
PROCESSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[BASE[2]], BASE[5:7]]},
    "suppress_tokens": {"suppress_tokens": [BASE[2], BASE[5]]},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": BASE[3]},
    "all_together": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [BASE[4]],
        "min_new_tokens": 9, "eos_token_id": [BASE[7], BASE[9]],
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", PROCESSED.values(), ids=PROCESSED.keys())
@pytest.mark.parametrize("drafter", ["twin", "autoregressive", "ngram", "eagle2", "cape"])
def test_processors_see_the_text_of_each_position(drafter, settings):
    target, prompts = architecture("llama"), [PROMPT, *ragged(1)]
    right = wanted(target, prompts, 22, **settings)
    assert right[0] != BASE[:22], "the settings must change something"
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), FixedPolicy(length=6))
    assert decoder.generate(prompts, max_new_tokens=22, **settings).token_ids == right


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2"])
def test_prompts_of_thousands_of_tokens(drafter):
    target = llama(max_position_embeddings=4096)
    prompts = [random_prompt(2600), random_prompt(3), random_prompt(1100)]
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), "svip")
    output = decoder.generate(prompts, max_new_tokens=6)
    assert output.token_ids == wanted(target, prompts, 6)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("llama", drafter) for drafter in DRAFTERS]
    + [(name, "autoregressive") for name in ("mistral", "gemma2", "gemma3", "gpt2")],
)
def test_prompts_that_are_read_in_pieces(name, drafter, monkeypatch):
    monkeypatch.setattr("specdec.target.PREFILL_CHUNK", 16)
    target = architecture(name)
    prompts = [random_prompt(60), random_prompt(3), random_prompt(33)]
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), "fixed")
    output = decoder.generate(prompts, max_new_tokens=8)
    assert output.token_ids == wanted(target, prompts, 8)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_long_prompts_and_sliding_windows(name):
    target = architecture(name)
    prompts = [random_prompt(400), random_prompt(40)]
    decoder = SpeculativeDecoder(target, autoregressive(target), "fixed")
    assert decoder.generate(prompts, max_new_tokens=12).token_ids == wanted(target, prompts, 12)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("new", [1, 2, 6])
def test_up_to_the_last_position_of_the_context(drafter, new):
    target = llama(max_position_embeddings=32)
    prompts = [random_prompt(32 - new), random_prompt(24)]
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target), FixedPolicy(length=8))
    right = [plain(target, prompts[0], new), plain(target, prompts[1], 8)]
    with pytest.warns(UserWarning, match="context is 32 tokens"):
        output = decoder.generate(prompts, max_new_tokens=8)
    assert output.token_ids == right
    assert output.finish_reasons == ["length", "length"]


def test_long_rope_ends_where_its_rotation_would_change():
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4,
        "long_factor": [6.0] * 4, "original_max_position_embeddings": 40,
    }  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Phi3Config(
        vocab_size=64, **sizes, num_attention_heads=4, initializer_range=0.4,
        max_position_embeddings=128, original_max_position_embeddings=40, rope_parameters=rope,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    target, prompts = build(config, seed=3), [random_prompt(25), random_prompt(5)]
    decoder = SpeculativeDecoder(target, autoregressive(target), "fixed")
    output = decoder.generate(prompts, max_new_tokens=15)
    assert output.token_ids == wanted(target, prompts, 15)
    with pytest.warns(UserWarning, match="context is 40 tokens"):
        output = decoder.generate(prompts, max_new_tokens=20)
    assert output.token_ids == [plain(target, prompts[0], 15), plain(target, prompts[1], 20)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_eager_attention(name):
    target, prompts = ARCHITECTURES[name](), ragged(3)
    target.set_attn_implementation("eager")
    right = wanted(target, prompts, 12)
    texts = [prompt + new for prompt, new in zip(prompts, right, strict=True)]
    for drafter in (autoregressive(target), random_trees(texts)):
        output = SpeculativeDecoder(target, drafter).generate(prompts, max_new_tokens=12)
        assert output.token_ids == right


def test_learned_positions_end_with_the_context():
    target, prompt = architecture("gpt2"), random_prompt(500)
    decoder = SpeculativeDecoder(target, autoregressive(target), FixedPolicy(length=8))
    output = decoder.generate([prompt, [4]], max_new_tokens=12)
    assert output.token_ids == wanted(target, [prompt, [4]], 12)


# --- what a round costs and keeps -----------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 0.05, 30.0])
@pytest.mark.parametrize("length", [1, 4])
def test_cache_lengths_after_every_round(length, eps):
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, autoregressive(target, eps), FixedPolicy(length=length))
    request = decoder.request(ragged(3), max_new_tokens=20)
    generation = Generation(decoder.target, decoder.drafter, decoder.policy, request)
    for _ in generation.run():
        state = generation.state
        if not state.rows or not generation.records:
            continue
        assert state.cache.lengths == [n - 1 for n in state.lengths]
        drafted = generation.drafter.cache.lengths
        behind = [n - have for n, have in zip(state.lengths, drafted, strict=True)]
        assert set(behind) <= {1, 2} or generation.state.limits == [0] * len(behind)


def test_a_perfect_drafter_needs_the_fewest_rounds():
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, autoregressive(target, eps=0), FixedPolicy(length=8))
    output = decoder.generate(PROMPT, max_new_tokens=40)
    # One token from the prompt's pass, then nine a round.
    assert output.statistics.rounds == math.ceil(39 / 9)
    assert output.statistics.alpha == 1.0


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_the_drafter_reads_every_position_once(eps, monkeypatch):
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, autoregressive(target, eps), FixedPolicy(length=4))
    read: list[int] = []
    forward = decoder.drafter.model.forward

    def spy(tokens, cache, starts, **arguments):
        read.extend(range(starts[0], starts[0] + tokens.shape[1]))
        return forward(tokens, cache, starts, **arguments)

    monkeypatch.setattr(decoder.drafter.model, "forward", spy)
    output = decoder.generate(PROMPT, max_new_tokens=30)
    text = len(PROMPT) + len(output.token_ids[0])
    assert set(read) >= set(range(text - 2)), "no position is left out"
    rejected = output.statistics.drafted - output.statistics.accepted
    assert len(read) - len(set(read)) <= rejected, "only what was rejected is read again"
    if eps == 0:
        assert sorted(read) == sorted(set(read))


def test_a_single_token_needs_no_draft(monkeypatch):
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, autoregressive(target), "fixed")
    monkeypatch.setattr(decoder.drafter.model, "forward", None)
    assert decoder.generate(PROMPT, max_new_tokens=1).token_ids == [BASE[:1]]
    assert decoder.generate(PROMPT, max_new_tokens=0).token_ids == [[]]


def test_low_precision_differs_only_at_ties():
    target = llama().to(torch.bfloat16)
    prompts = [random_prompt(6, seed) for seed in range(3)]
    decoder = SpeculativeDecoder(target, autoregressive(target), "fixed")
    output = decoder.generate(prompts, max_new_tokens=30)
    for prompt, ours in zip(prompts, output.token_ids, strict=True):
        theirs = plain(target, prompt, 30)
        place = next((i for i in range(30) if ours[i] != theirs[i]), None)
        if place is None:
            continue
        with torch.no_grad():
            logits = target(torch.tensor([prompt + ours[:place]])).logits[0, -1].float()
        best = logits.topk(2).values
        ulp = 2.0 ** (math.floor(math.log2(float(best[0].abs()))) - 7)
        assert float(best[0] - best[1]) <= 4 * ulp, "a difference that is no near-tie is a fault"


def test_overlapping_models_share_their_weights():
    """The target's own first layers as drafter, the output layer shared: hooks must not mix."""
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, AutoregressiveDrafter(model=target), "fixed")
    output = decoder.generate(ragged(3), max_new_tokens=NEW)
    assert output.token_ids == wanted(target, ragged(3))
    assert output.statistics.alpha == 1.0


def test_no_row_has_a_draft():
    """Nothing repeats in the prompt, so the n-gram drafter has nothing to propose at first."""
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, NgramDrafter(min_ngram=3), "fixed")
    output = decoder.generate([[3], [4, 5]], max_new_tokens=NEW)
    assert output.token_ids == wanted(target, [[3], [4, 5]])
    assert output.rounds[0].drafted == [0, 0]


def test_plain_decoding():
    target = architecture("llama")
    output = SpeculativeDecoder(target).generate(ragged(3), max_new_tokens=NEW)
    assert output.token_ids == wanted(target, ragged(3))
    assert output.statistics.drafted == 0
    assert output.statistics.tau == 1.0


def test_noise_makes_another_model():
    """`eps` large: a drafter of which next to nothing is accepted."""
    target = architecture("llama")
    decoder = SpeculativeDecoder(target, AutoregressiveDrafter(model=noisy(target, 30.0)), "fixed")
    output = decoder.generate(PROMPT, max_new_tokens=NEW)
    assert output.token_ids == [BASE[:NEW]]
    assert output.statistics.alpha < 0.2
