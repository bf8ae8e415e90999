"""Proofs on this machine: that a combination writes what the target alone would, and its costs.

`specdec check` prints what these functions find.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.decoder import SpeculativeDecoder
from specdec.diagnosis import Diagnosis
from specdec.metrics import RoundRecord, Statistics

TIE = 1e-4
"""Two logits are a tie in float32 when they are this close, relative to the larger one."""
SUPPORT = 4
"""The sampling check draws from so many tokens at each position (top-k)."""
DEPTH = 3
"""The sampling check looks at the joint law of so many tokens."""
LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are pooled, as the chi-square law asks for."""
SUSPICIOUS = 1e-4
"""A correct combination gives a p-value below this once in ten thousand checks."""

TRANSFORMERS_SETTINGS = (
    "max_new_tokens",
    "min_new_tokens",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
)
"""The generation settings that transformers' greedy search takes under the same name."""


@dataclass(frozen=True)
class GreedyCheck:
    """One prompt, decoded greedily by specdec and by transformers.

    Attributes:
        new_tokens: how many transformers wrote.
        differs_at: index of the first differing token; None when all are equal.
        gap: difference of the two highest scores there, by the target alone.
        tie: the gap is within rounding, so that either token is right.
    """

    new_tokens: int
    differs_at: int | None = None
    gap: float = 0.0
    tie: bool = False

    @property
    def passed(self) -> bool:
        return self.differs_at is None or self.tie

    def __str__(self) -> str:
        if self.differs_at is None:
            return f"equal, {self.new_tokens} tokens"
        verdict = "tie" if self.tie else "BUG"
        return f"differs at token {self.differs_at + 1}, top-2 gap {self.gap:.1e}: {verdict}"


def check_greedy(decoder: SpeculativeDecoder, prompts: Sequence[list[int]]) -> list[GreedyCheck]:
    """Compare greedy decoding with transformers' `generate`, prompt by prompt.

    specdec decodes all prompts as one ragged batch, transformers one after the other. In float32
    the two must be equal; in a lower precision ties are common.
    """
    output = decoder.generate(list(prompts), temperature=0.0, stop=None)
    checks = []
    for prompt, ours in zip(prompts, output.token_ids, strict=True):
        theirs = _greedy_by_transformers(decoder, prompt)[0]
        checks.append(_compare(decoder, prompt, ours, theirs))
    return checks


@dataclass(frozen=True)
class SamplingCheck:
    """How well samples follow the target's exact distribution.

    Attributes:
        samples: how many there were, of `DEPTH` tokens each.
        drafted: draft tokens that were tried in them; 0 tests nothing.
        chi_square, degrees: the statistic over the pooled cells.
        p_value: chance of one this large when all is right.
        outside: samples that the target cannot have written.
    """

    samples: int
    drafted: int
    chi_square: float
    degrees: int
    p_value: float
    outside: int

    @property
    def passed(self) -> bool:
        return self.outside == 0 and self.p_value >= SUSPICIOUS

    def __str__(self) -> str:
        if self.outside:
            return f"{self.outside} of {self.samples} samples cannot come from the target: BUG"
        verdict = "follow the target's distribution" if self.passed else "do not follow it: BUG"
        return (
            f"{self.samples} samples of {DEPTH} tokens {verdict} (χ² {self.chi_square:.1f} at "
            f"{self.degrees} degrees of freedom, p = {self.p_value:.2g}, {self.drafted} drafted)"
        )


def check_sampling(
    decoder: SpeculativeDecoder, prompt: list[int], samples: int = 256, batch: int = 64
) -> SamplingCheck:
    """Compare samples of the next `DEPTH` tokens with the exact law of the target alone.

    The law is enumerated: top-k leaves `SUPPORT` tokens at each position. It is a quick check that
    no gross fault passes: with so few samples, a total variation of some percent is lost in noise.
    """
    temperature = decoder.settings.temperature or 1.0
    law = exact_law(decoder, prompt, temperature)
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = 0
    for seed in range(0, samples, batch):
        output = decoder.generate(
            [prompt] * min(batch, samples - seed),
            max_new_tokens=DEPTH + 1,  # so that a draft can reach the last token that counts
            temperature=temperature,
            top_k=SUPPORT,
            seed=seed,
            **_PLAIN,
        )
        counts.update(tuple(row[:DEPTH]) for row in output.token_ids)
        drafted += output.statistics.drafted
    chi_square, degrees = _chi_square(counts, law, samples)
    p_value = _chi_square_tail(chi_square, degrees)
    outside = sum(count for cell, count in counts.items() if cell not in law)
    return SamplingCheck(samples, drafted, chi_square, degrees, p_value, outside)


_PLAIN: dict[str, Any] = {
    "top_p": None, "min_p": None, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "min_new_tokens": 0, "bad_words_ids": None, "suppress_tokens": None, "eos_token_id": [],
    "stop": None,
}  # fmt: skip
"""What would change the law beside temperature and top-k, turned off."""


@torch.no_grad()
def exact_law(
    decoder: SpeculativeDecoder, prompt: list[int], temperature: float
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `DEPTH` tokens, by the target alone, without a cache."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        paths = list(law)
        ids = torch.tensor([prompt + list(path) for path in paths], device=decoder.target.device)
        logits = decoder.target.model(input_ids=ids, use_cache=False).logits[:, -1]
        best = (logits.float() / temperature).topk(SUPPORT)
        probs = torch.softmax(best.values, -1)
        law = {
            (*path, token): law[path] * prob
            for path, tokens, row in zip(paths, best.indices.tolist(), probs.tolist(), strict=True)
            for token, prob in zip(tokens, row, strict=True)
        }
    return law


def measure(decoder: SpeculativeDecoder, prompts: Sequence[list[int]]) -> Diagnosis:
    """What a round costs, next to plain decoding with the same target; one prompt at a time.

    The two take turns, so that a machine whose speed drifts is fair to both.
    """
    plain = SpeculativeDecoder(decoder.target, settings=decoder.settings, seed=decoder.seed)
    for each in (plain, decoder):  # warm-up
        each.generate(prompts[0], max_new_tokens=8)
    alone: list[RoundRecord] = []
    together: list[RoundRecord] = []
    for prompt in prompts:
        alone += plain.generate(prompt).rounds
        together += decoder.generate(prompt).rounds
    seconds = sum(record.seconds for record in together)
    tokens = sum(sum(record.committed) for record in together)
    plain_seconds = sum(record.seconds for record in alone)
    return Diagnosis.of(
        Statistics.from_rounds(together, tokens, wall_s=seconds),
        plain=sum(record.verify_seconds for record in alone) / max(1, len(alone)),
        speedup=plain_seconds / max(1, len(alone)) * tokens / seconds if seconds else None,
    )


def _greedy_by_transformers(
    decoder: SpeculativeDecoder, prompt: list[int], **settings: Any
) -> tuple[list[int], Tensor]:
    """The new tokens, and the processed scores `[T, V]` they were taken from."""
    ids = torch.tensor([prompt], device=decoder.target.device)
    asked = {name: getattr(decoder.settings, name) for name in TRANSFORMERS_SETTINGS}
    if decoder.settings.eos_token_id is not None:
        asked["eos_token_id"] = decoder.settings.eos_token_id
    model: Any = decoder.target.model
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **{name: value for name, value in asked.items() if value} | settings,
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.scores)


def _compare(
    decoder: SpeculativeDecoder, prompt: list[int], ours: list[int], theirs: list[int]
) -> GreedyCheck:
    if ours == theirs:
        return GreedyCheck(len(theirs))
    pairs = itertools.zip_longest(ours, theirs)
    first = next(index for index, (mine, other) in enumerate(pairs) if mine != other)
    scores = _greedy_by_transformers(decoder, prompt, max_new_tokens=first + 1)[1]
    best, second = scores[min(first, len(scores) - 1)].topk(2).values.tolist()
    return GreedyCheck(
        len(theirs), first, best - second, tie=best - second <= TIE * max(1.0, abs(best))
    )


def _chi_square(
    counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], samples: int
) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare cells are pooled into one."""
    cells = [(counts[cell], prob * samples) for cell, prob in law.items()]
    common = [cell for cell in cells if cell[1] >= LEAST_EXPECTED]
    rare = [cell for cell in cells if cell[1] < LEAST_EXPECTED]
    if rare:
        common.append((sum(seen for seen, _ in rare), sum(expected for _, expected in rare)))
    statistic = sum((seen - expected) ** 2 / max(expected, 1e-9) for seen, expected in common)
    return statistic, max(1, len(common) - 1)


def _chi_square_tail(statistic: float, degrees: int) -> float:
    halves = torch.tensor([[degrees / 2], [statistic / 2]], dtype=torch.float64)
    return torch.special.gammaincc(*halves).item()
