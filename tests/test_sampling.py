"""`Sampler`: scores against transformers' processors called one by one, draws against their laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec import SpeculativeDecoder
from specdec.cache import SlotCache
from specdec.generation import GenerationSettings, make_processors
from specdec.sampling import PREFIX_FREE, Sampler
from specdec.state import GenerationState
from tests.tiny import PROMPT, llama, noisy

VOCAB = 12
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5], [7, 8, 7, 8, 7]]
CPU = torch.device("cpu")


class LastToken(LogitsProcessor):
    """A user's own processor: it favours the last token of the prefix."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[-1])


def state_of(sampler: Sampler, prompts: list[list[int]] = PROMPTS) -> GenerationState:
    return GenerationState(prompts, SlotCache(len(prompts)), sampler, sampler.eos or [], CPU)


def logits(rows: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


# --- scores ---------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[dict[str, Any], list[LogitsProcessor]]] = {
    "nothing": ({"temperature": 1.0}, []),
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "cuts": (
        {"temperature": 1.0, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
        [TopKLogitsWarper(5), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)],
    ),
    "penalties": (
        {"temperature": 1.0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        [RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2)],
    ),
    "bans": (
        {"temperature": 1.0, "bad_words_ids": [[3], [1, 2], [7, 8, 9]], "suppress_tokens": [5]},
        [
            NoBadWordsLogitsProcessor([[3], [1, 2], [7, 8, 9]]),
            SuppressTokensLogitsProcessor([5], device="cpu"),
        ],
    ),
    "greedy": ({"temperature": 0.0, "repetition_penalty": 1.5, "top_k": 3},
               [RepetitionPenaltyLogitsProcessor(1.5)]),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("users", [[], [LastToken()]], ids=["", "user"])
def test_scores_are_those_of_transformers_for_the_prefix_of_each_node(
    setting: str, users: list[LogitsProcessor]
) -> None:
    """Nodes of ragged rows in any order, behind paths of their own."""
    given, expected = SETTINGS[setting]
    chosen = GenerationSettings(**given)
    sampler = Sampler(make_processors(chosen, users, CPU), do_sample=chosen.temperature > 0)
    warpers = [each for each in expected if "Warper" in type(each).__name__]
    by_hand = [each for each in expected if each not in warpers] + users + warpers
    rows = torch.tensor([2, 0, 3, 0, 1, 2, 3])
    path = torch.randint(0, VOCAB, (len(rows), 3), generator=torch.Generator().manual_seed(1))
    raw = logits(len(rows))
    kept = raw.clone()
    found = sampler.scores(raw, state_of(sampler), path, rows)
    assert torch.equal(raw, kept), "the target's logits must stay as they are"
    for node, row in enumerate(rows.tolist()):
        prefix = torch.tensor([PROMPTS[row] + path[node].tolist()])
        scores = kept[node : node + 1].clone()
        for processor in by_hand:
            scores = processor(prefix, scores)
        assert torch.equal(found[node], scores[0])


def test_scores_without_rows_are_one_for_each_row() -> None:
    sampler = Sampler(LogitsProcessorList([LastToken()]), do_sample=True)
    found = sampler.scores(
        logits(4), state_of(sampler), torch.zeros(4, 0, dtype=torch.long)
    ) - logits(4)
    assert found.argmax(-1).tolist() == [prompt[-1] for prompt in PROMPTS]


def test_scores_are_float32_whatever_the_model_computes_in() -> None:
    sampler = Sampler(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), do_sample=True)
    raw = logits(4).to(torch.bfloat16)
    found = sampler.scores(raw, state_of(sampler), torch.zeros(4, 0, dtype=torch.long))
    assert torch.equal(found, raw.float() / 0.5)


@pytest.mark.parametrize("drafted", [0, 1, 2, 3])
def test_no_end_of_text_before_its_time(drafted: int) -> None:
    """Of each row's own length; ids that the model has no logit for are none of its business."""
    ends = [2, 9, VOCAB + 5]
    sampler = Sampler(
        LogitsProcessorList(), do_sample=True, eos=ends,
        no_eos_before=[len(prompt) + 2 for prompt in PROMPTS],
    )  # fmt: skip
    state = state_of(sampler)
    path = torch.zeros(4, drafted, dtype=torch.long)
    found = sampler.scores(logits(4), state, path)
    for row, prompt in enumerate(PROMPTS):
        rule = MinNewTokensLengthLogitsProcessor(len(prompt), 2, ends, device="cpu")
        prefix = torch.tensor([prompt + [0] * drafted])
        assert torch.equal(found[row], rule(prefix, logits(4)[row : row + 1])[0])


MADE = [
    EpsilonLogitsWarper(0.05),
    EtaLogitsWarper(0.05, device="cpu"),
    InfNanRemoveLogitsProcessor(),
    LogitNormalization(),
    MinPLogitsWarper(0.1),
    SuppressTokensLogitsProcessor([1, 2], device="cpu"),
    TemperatureLogitsWarper(0.5),
    TopKLogitsWarper(3),
    TopPLogitsWarper(0.5),
    TypicalLogitsWarper(0.5),
]


def test_processors_called_once_for_all_nodes_do_not_read_the_prefix() -> None:
    assert {type(each) for each in MADE} == set(PREFIX_FREE)
    for processor in MADE:
        one = processor(torch.tensor([PROMPTS[0]]), logits(6))
        assert torch.equal(one, processor(torch.tensor([PROMPTS[3] * 3] * 6), logits(6)))
        row = processor(torch.tensor([[0]]), logits(6)[4:5])
        assert torch.allclose(one[4:5], row, atol=1e-6), "a node's scores are its own"


# --- draws ----------------------------------------------------------------------------------------

PROBS = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.0, 0.1])


def chi_square_p(found: Tensor, expected: Tensor) -> float:
    """Probability of counts at least this far from `expected`, which is positive everywhere."""
    statistic = float(((found - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, found.numel() - 1))


def test_multinomial_has_the_law_of_the_distribution() -> None:
    sampler = Sampler(LogitsProcessorList(), do_sample=True, seed=0)
    drawn = sampler.multinomial(PROBS.expand(20_000, -1))
    counts = torch.bincount(drawn, minlength=6).double()
    possible = PROBS > 0
    assert counts[~possible].sum() == 0
    assert chi_square_p(counts[possible], PROBS[possible].double() * 20_000) > 1e-6


def test_multinomial_takes_weights_that_do_not_sum_to_one() -> None:
    one = Sampler(LogitsProcessorList(), do_sample=True, seed=0)
    other = Sampler(LogitsProcessorList(), do_sample=True, seed=0)
    many = PROBS.expand(1000, -1)
    assert torch.equal(one.multinomial(many), other.multinomial(many / 8))


def test_draws_without_replacement_have_their_law() -> None:
    """P(a, then b) = p(a) p(b) / (1 - p(a)); what cannot be drawn comes last."""
    sampler = Sampler(LogitsProcessorList(), do_sample=True, seed=1)
    drawn = sampler.without_replacement(PROBS.expand(20_000, -1), 6)
    assert drawn.sort(dim=1).values.equal(torch.arange(6).expand(20_000, -1))
    assert PROBS[drawn[:, 4:]].sum() == 0
    p = PROBS[PROBS > 0].double()
    expected = 20_000 * p[:, None] * p / (1 - p[:, None])
    counts = torch.zeros(6, 6, dtype=torch.double)
    counts.index_put_(
        (drawn[:, 0], drawn[:, 1]), torch.ones(20_000, dtype=torch.double), accumulate=True
    )
    counts = counts[PROBS > 0][:, PROBS > 0]
    different = ~torch.eye(len(p), dtype=torch.bool)
    assert counts[~different].sum() == 0
    assert chi_square_p(counts[different], expected[different]) > 1e-6


def test_rows_are_drawn_independently() -> None:
    sampler = Sampler(LogitsProcessorList(), do_sample=True, seed=2)
    pairs = sampler.multinomial(PROBS.expand(20_000, 2, -1))
    p = PROBS[PROBS > 0].double()
    counts = torch.zeros(6, 6, dtype=torch.double)
    ones = torch.ones(20_000, dtype=torch.double)
    counts.index_put_(tuple(pairs.T), ones, accumulate=True)
    counts = counts[PROBS > 0][:, PROBS > 0]
    assert chi_square_p(counts, 20_000 * p[:, None] * p) > 1e-6


def test_draw_returns_the_very_distribution_it_drew_from() -> None:
    scores = logits(50)
    tokens, probs = Sampler(LogitsProcessorList(), do_sample=True, seed=0).draw(scores)
    assert torch.equal(probs, scores.softmax(-1))
    again, _ = Sampler(LogitsProcessorList(), do_sample=True, seed=0).draw(scores)
    assert torch.equal(tokens, again)


def test_a_greedy_draw_is_a_point_mass() -> None:
    tokens, probs = Sampler(LogitsProcessorList(), do_sample=False).draw(logits(5))
    assert probs is None
    assert torch.equal(tokens, logits(5).argmax(-1))


def test_uniform_numbers_fill_the_unit_interval() -> None:
    sampler = Sampler(LogitsProcessorList(), do_sample=True, seed=3)
    found = sampler.uniform(torch.zeros(20_000, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert found.min() >= 0
    assert found.max() < 1
    counts = torch.histc(found, bins=20, min=0, max=1).double()
    assert chi_square_p(counts, torch.full((20,), 1000.0).double()) > 1e-6


# --- seeds ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = llama()
    return SpeculativeDecoder(target, {"name": "autoregressive", "model": noisy(target, 0.2)})


def write(decoder: SpeculativeDecoder, **arguments: Any) -> list[list[int]]:
    out = decoder.generate([PROMPT, PROMPT[:3]], max_new_tokens=24, temperature=3.0, **arguments)
    return out.token_ids


def test_a_seed_makes_a_text_repeatable(decoder: SpeculativeDecoder) -> None:
    first = write(decoder, seed=7)
    torch.rand(3)
    assert write(decoder, seed=7) == first
    assert write(decoder, seed=8) != first
    assert first[0] != first[1]


def test_without_a_seed_every_text_is_another(decoder: SpeculativeDecoder) -> None:
    assert write(decoder) != write(decoder)


def test_torch_manual_seed_makes_a_text_repeatable(decoder: SpeculativeDecoder) -> None:
    torch.manual_seed(5)
    first = write(decoder)
    torch.manual_seed(5)
    assert write(decoder) == first


def test_a_seeded_call_leaves_the_global_generator_alone(decoder: SpeculativeDecoder) -> None:
    before = torch.get_rng_state()
    write(decoder, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_decoder_has_a_default_seed(decoder: SpeculativeDecoder) -> None:
    seeded = SpeculativeDecoder(decoder.target, decoder.drafter, seed=7)
    assert write(seeded) == write(decoder, seed=7)
    assert write(seeded, seed=8) == write(decoder, seed=8)
