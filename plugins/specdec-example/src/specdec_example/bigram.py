"""Bigram: what followed this token so far in this very text."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

import specdec
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.vocab import DraftVocabulary
from specdec.state import GenerationState
from specdec.target import Target


class BigramDrafter(ChainDrafter):
    """Draw the next token from the counts of what followed the last one in the text so far.

    A `ChainDrafter` draws one token after the other; all it needs is the logits of each next token.
    Because they are a distribution and not a fixed proposal, sampling stays lossless at every
    temperature, and policies that look at the distribution (SVIP, confidence) have something to
    look at. Nothing is kept between rounds: the text is counted anew, which is quick enough.
    """

    summary = "what followed the last token so far in this text"
    source = "a template for plugins"

    class Params(specdec.Params):
        smoothing: float = Field(
            0.001, gt=0, description="count given to every token that has not followed yet"
        )

    def attach(self, target: Target) -> None:
        # All of the target's tokens may be drafted.
        self.vocabulary = DraftVocabulary(target.vocab_size, target.vocab_size)
        self.vocabulary.to(target.device)

    def first(self, state: GenerationState) -> Tensor:
        return self._log_counts(state.roots)

    def following(self, tokens: Tensor, depth: int) -> Tensor:
        return self._log_counts(tokens)

    def _log_counts(self, last: Tensor) -> Tensor:
        """Logits `[B, V]` for the token behind `last [B]`."""
        ids = self.state.ids
        pair = torch.arange(ids.shape[1] - 1, device=ids.device)
        in_text = pair < self.state.last_positions[:, None]
        follows = in_text & (ids[:, :-1] == last[:, None])
        counts = torch.full(
            (len(ids), self.vocabulary.size), self.params.smoothing, device=ids.device
        )
        counts.scatter_add_(1, ids[:, 1:], follows.to(counts.dtype))
        return counts.log()
