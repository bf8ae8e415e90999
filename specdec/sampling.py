"""From logits to distributions and tokens, with transformers' own logits processors.

Every distribution is computed for the prefix of its own node: the committed text of its row and the
drafted tokens on the way to it. The target's `p` and the drafter's `q` both go through here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specdec.errors import SpecdecError
from specdec.host import send

if TYPE_CHECKING:
    from specdec.state import GenerationState

PREFIX_FREE: tuple[type[LogitsProcessor], ...] = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that do not read the prefix: all nodes go through them in one call."""


class Sampler:
    """The sampling rule of one generation.

    Args:
        processors: transformers' processors and warpers in their order, a user's own included.
        do_sample: draw from the distribution; False takes the highest score (greedy).
        seed: of the random numbers of this generation; None draws one.
        no_eos_before: for each row of the original batch, the length in tokens that a text must
            reach before it may end; None when it may end at once.
        eos: the ids that end a text.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        do_sample: bool,
        seed: int | None = None,
        no_eos_before: list[int] | None = None,
        eos: list[int] | None = None,
    ) -> None:
        self.processors = processors
        self.do_sample = do_sample
        # From torch's global generator, so that torch.manual_seed makes a run repeatable too.
        self.seed = int(torch.randint(2**62, ())) if seed is None else seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.no_eos_before = no_eos_before if eos else None
        self.eos = eos
        self.reads_prefix = any(type(processor) not in PREFIX_FREE for processor in processors)

    def reseed(self, seed: int) -> None:
        """Start the random numbers again, from `seed`."""
        self.seed = seed
        self._generators.clear()

    def scores(
        self, logits: Tensor, state: GenerationState, path: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Processed scores `[R, V]`, float32.

        Args:
            logits: `[R, V]` raw, over the target's vocabulary.
            path: `[R, d]` drafted tokens between the committed text and each node.
            rows: `[R]` on the host, the row of the batch that each node belongs to; None means that
                node r belongs to row r.
        """
        if not self.processors and self.no_eos_before is None:
            return logits.float()
        scores = logits.to(torch.float32, copy=True)
        owners = list(range(len(logits))) if rows is None else rows.tolist()
        if self.no_eos_before is not None:
            self._forbid_early_end(scores, state, owners, path.shape[1])
        if not self.reads_prefix:
            return self.processors(state.ids[:1, :1], scores)  # type: ignore[arg-type]
        by_length = defaultdict(list)
        for node, row in enumerate(owners):
            by_length[state.lengths[row]].append(node)
        done = torch.empty_like(scores)
        for length, nodes in by_length.items():
            committed = state.ids[send([owners[node] for node in nodes], state.device), :length]
            here = send(nodes, scores.device)
            drafted = path.to(scores.device)[here]
            prefix = torch.cat([committed.to(scores.device), drafted], dim=1)
            done[here] = self.processors(prefix, scores[here])  # type: ignore[arg-type]
        return done

    def _forbid_early_end(
        self, scores: Tensor, state: GenerationState, owners: list[int], depth: int
    ) -> None:
        assert self.no_eos_before is not None
        assert self.eos is not None
        early = [
            node
            for node, row in enumerate(owners)
            if state.lengths[row] + depth < self.no_eos_before[state.rows[row]]
        ]
        # A generation config may name an end of text that the model has no logit for.
        ends = [token for token in self.eos if token < scores.shape[-1]]
        if early and ends:
            rows, tokens = send(early, scores.device), send(ends, scores.device)
            scores[rows[:, None], tokens] = -torch.inf

    def draw(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens `[R]` for scores `[R, V]`, and the distribution `[R, V]` they were drawn from.

        Greedy tokens are point masses: their distribution is None.
        """
        if not self.do_sample:
            return scores.argmax(-1), None
        probs = torch.softmax(scores, dim=-1)
        return self.multinomial(probs), probs

    def multinomial(self, probs: Tensor) -> Tensor:
        """One index `[...]` for each distribution `[..., V]`, without a host synchronisation.

        Exponential race: the smallest `e / p` with `e ~ Exp(1)` is an exact draw from `p`.
        """
        return self._race(probs).argmax(-1)

    def without_replacement(self, probs: Tensor, count: int) -> Tensor:
        """`[..., count]` different indices for each distribution `[..., V]`, in the order drawn.

        The first `count` of the exponential race: each is drawn from what the ones before it left.
        Behind the last index with any probability the order means nothing.
        """
        return self._race(probs).topk(count, dim=-1).indices

    def _race(self, probs: Tensor) -> Tensor:
        times = torch.empty_like(probs).exponential_(generator=self._generator(probs.device))
        return probs / times.clamp_min_(torch.finfo(times.dtype).tiny)

    def uniform(self, like: Tensor) -> Tensor:
        """Uniform numbers in [0, 1), float32, of the shape of `like`."""
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device)

    def _generator(self, device: torch.device) -> torch.Generator:
        # A drafter may live on another device than the target: each has its own stream of numbers.
        if device not in self._generators:
            offset = len(self._generators)
            self._generators[device] = torch.Generator(device).manual_seed(self.seed + offset)
        return self._generators[device]


KNOWS_ROWS: tuple[type[LogitsProcessor], ...] = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
KEEPS_STATE: tuple[type[LogitsProcessor], ...] = (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def check_processors(processors: LogitsProcessorList, batch_size: int) -> None:
    """Refuse processors that cannot be called node by node.

    Raises:
        SpecdecError: a processor identifies rows by their place in the batch, or counts its calls.
    """
    for processor in processors:
        name = type(processor).__name__
        if isinstance(processor, KNOWS_ROWS) and batch_size > 1:
            raise SpecdecError(
                f"logits processors: {name} knows a row by its place in the batch, which the nodes "
                "of a draft do not have; generate the prompts one at a time."
            )
        if isinstance(processor, KEEPS_STATE):
            raise SpecdecError(
                f"logits processors: {name} expects one call for each token that is written, and "
                "drafts are tried and rejected; leave it out."
            )
