"""Is a decoder lossless? Its samples against the target's own law, by exact enumeration.

    decoder = SpeculativeDecoder(tiny_llama(), drafter, policy)
    assert_lossless(decoder, temperature=0.6, top_k=4)

A tiny vocabulary makes the law of the first `LENGTH` new tokens a table: `exact_law` asks
transformers' own `generate` for the scores behind every possible text. The decoder writes thousands
of equal rows in a few calls, and chi-square tests compare the two: the joint law of three tokens in
a row, and that of two neighbours. The first token of a row comes from the prompt's pass; the others
from rounds, at places that differ from row to row, so caches and ragged rows take part.

A lossless decoder fails one of these tests once in `1 / BOUND` cases; seeds are fixed. That they see
a broken rule is shown in `test_sampling_law.py`, which breaks the rules on purpose.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from specdec import SpeculativeDecoder

# Thousands of rows are many lists: without this each collection of garbage looks at all that
# transformers has imported, too.
gc.freeze()

LENGTH = 4
"""New tokens whose law is enumerated."""
PROMPT = [1, 2, 3, 1]
ROWS = 1250
"""Rows of one call. They are independent, and differ in what they accept."""
BOUND = 1e-6
"""Smallest probability of a chi-square test that passes."""
SMALLEST_CELL = 5.0
"""Texts that are expected less often than this count together."""


def tiny_llama(
    vocab: int = 6, seed: int = 0, scale: float = 3.0, **config: Any
) -> LlamaForCausalLM:
    """A random Llama with `vocab` tokens; `scale` makes its distributions neither flat nor sure."""
    settings = {
        "vocab_size": vocab, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | config))).eval()
    for weight in model.parameters():
        weight.data *= 1.0 if weight.dim() == 1 else 6.0
    model.lm_head.weight.data *= scale
    return model


@torch.no_grad()
def exact_law(
    model: PreTrainedModel,
    prompt: list[int],
    length: int = LENGTH,
    processors: Sequence[LogitsProcessor] = (),
    **settings: Any,
) -> Tensor:
    """Probability of every text of `length` tokens behind `prompt`, a table `[V + 1, V + 1, ...]`.

    Index V stands for the places behind the end of a text. Settings are those of
    `SpeculativeDecoder.generate`; transformers reads them.
    """
    vocab = model.config.vocab_size
    table = torch.zeros((vocab + 1,) * length, dtype=torch.float64)
    ends = _as_list(settings.get("eos_token_id"))
    # Each prefix is a prompt of its own here, so a minimum of new tokens has to be counted here too.
    least, banned = settings.pop("min_new_tokens", 0), settings.pop("suppress_tokens", [])
    texts, chances = torch.zeros(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.float64)
    for written in range(length):
        prefix = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts], dim=1)
        suppressed = banned + (ends if written < least else [])
        answer = model.generate(
            prefix, attention_mask=torch.ones_like(prefix), max_new_tokens=1, do_sample=True,
            logits_processor=LogitsProcessorList(processors), output_scores=True,
            return_dict_in_generate=True, pad_token_id=0, suppress_tokens=suppressed or None,
            **({"top_k": 0} | settings),
        )  # fmt: skip
        p = torch.softmax(answer.scores[0].double(), dim=-1)
        place, token = p.nonzero(as_tuple=True)
        texts = torch.cat([texts[place], token[:, None]], dim=1)
        chances = chances[place] * p[place, token]
        ended = torch.isin(token, torch.tensor(ends, dtype=torch.long))
        for text, chance in zip(texts[ended].tolist(), chances[ended].tolist(), strict=True):
            table[(*text, *[vocab] * (length - written - 1))] = chance
        texts, chances = texts[~ended], chances[~ended]
    table[tuple(texts.T)] = chances
    return table


def sample_counts(
    decoder: SpeculativeDecoder,
    prompt: list[int],
    length: int = LENGTH,
    rows: int = ROWS,
    calls: int = 2,
    seed: int = 0,
    **arguments: Any,
) -> Tensor:
    """How often the decoder wrote each text in `calls` calls: counts in the shape of `exact_law`.

    It writes three tokens more than are looked at, so that drafts are not cut short by the end.
    """
    vocab = decoder.target.vocab_size
    shape = (vocab + 1,) * length
    counts = torch.zeros(shape, dtype=torch.float64)
    one = torch.ones(rows, dtype=torch.float64)
    for call in range(calls):
        out = decoder.generate(
            [prompt] * rows, max_new_tokens=length + 3, seed=1000 * seed + call, **arguments
        )
        padded = [(text + [vocab] * length)[:length] for text in out.token_ids]
        counts.index_put_(tuple(torch.tensor(padded).T), one, accumulate=True)
    return counts


@dataclass
class Fit:
    """How well counts fit a law.

    Attributes:
        p_value: how probable it is that counts from this very law lie as far from it.
        z: the chi-square statistic, in standard deviations above its mean.
        total_variation: between the observed shares and the law (sampling noise included).
        impossible: samples whose probability is 0.
    """

    p_value: float
    z: float
    total_variation: float
    impossible: int

    @property
    def passes(self) -> bool:
        return self.impossible == 0 and self.p_value >= BOUND


def fit(law: Tensor, counts: Tensor) -> Fit:
    """Chi-square test of `counts` against `law`, tables of the same shape."""
    law, counts = law.flatten(), counts.flatten()
    total = counts.sum()
    expected = law * total
    impossible = int(counts[law == 0].sum())
    common = expected >= SMALLEST_CELL
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    awaited = torch.cat([expected[common], expected[~common].sum()[None]])
    seen, awaited = seen[awaited > 0], awaited[awaited > 0]
    statistic = float(((seen - awaited) ** 2 / awaited).sum())
    freedom = max(1, len(awaited) - 1)
    return Fit(
        p_value=float(chi2.sf(statistic, freedom)),
        z=(statistic - freedom) / (2 * freedom) ** 0.5,
        total_variation=float((counts / total - law).abs().sum() / 2),
        impossible=impossible,
    )


def fits(law: Tensor, counts: Tensor) -> dict[str, Fit]:
    """The joint laws of all two and all three neighbouring tokens."""
    places = [
        tuple(range(first, first + count))
        for count in (2, 3)
        for first in range(law.dim() - count + 1)
    ]
    found = {}
    for kept in places:
        others = tuple(place for place in range(law.dim()) if place not in kept)
        name = "tokens " + ", ".join(str(place + 1) for place in kept)
        found[name] = fit(law.sum(others), counts.sum(others)) if others else fit(law, counts)
    return found


def check(
    decoder: SpeculativeDecoder,
    prompt: list[int] = PROMPT,
    processors: Sequence[LogitsProcessor] = (),
    calls: int = 2,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Fit]:
    """Sample from `decoder` and compare with the law of its target."""
    settings = {"temperature": 1.0} | settings
    law = exact_law(decoder.target.model, prompt, processors=processors, **settings)
    counts = sample_counts(
        decoder, prompt, calls=calls, seed=seed, logits_processor=processors, **settings
    )
    return fits(law, counts)


def assert_lossless(decoder: SpeculativeDecoder, *args: Any, **settings: Any) -> None:
    """Fail unless the samples of `decoder` have its target's law; takes what `check` takes."""
    bad = {
        name: each for name, each in check(decoder, *args, **settings).items() if not each.passes
    }
    assert not bad, f"not the target's law: {bad}"


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [ids] if isinstance(ids, int) else ids or []
