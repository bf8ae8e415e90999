"""N-gram (prompt lookup): what followed the last time the text said this."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from specdec.draft import DraftStep, DraftTree
from specdec.drafters.base import Drafter
from specdec.host import read, send
from specdec.params import Params as ParamsBase
from specdec.state import GenerationState


class NgramDrafter(Drafter):
    """Propose the tokens behind the longest earlier match of the text's last tokens.

    Matches of `max_ngram` tokens are preferred to shorter ones, down to `min_ngram`; among equals the
    latest one. Where that one ends with the text, the proposal goes on with its own first tokens, as
    the copies of LZ77 do. Proposals have no distribution: they are point masses.

    Source: prompt lookup decoding (Saxena 2023); transformers' `prompt_lookup_num_tokens`.
    """

    summary = "prompt lookup: repeats what followed the same words before"
    source = "prompt lookup decoding (Saxena 2023)"

    class Params(ParamsBase):
        max_ngram: int = Field(3, ge=1, description="longest run of tokens to look up")
        min_ngram: int = Field(1, ge=1, description="shortest run of tokens to look up")
        num_tokens: int = Field(10, ge=1, description="at most this many tokens are proposed")

        @model_validator(mode="after")
        def _ordered(self) -> NgramDrafter.Params:
            if self.min_ngram > self.max_ngram:
                raise ValueError(
                    f"min_ngram ({self.min_ngram}) must not exceed max_ngram ({self.max_ngram})"
                )
            return self

    def begin(self, state: GenerationState) -> None:
        self.state = state
        self.tokens, counts = self.look_up(self.params, state)
        self.counts: list[int] = read(counts)
        self.depth = 1
        self.alive = [count > 0 for count in self.counts]
        self.kept = [int(alive) for alive in self.alive]

    def step(self) -> DraftStep | None:
        if not any(self.counts):
            return None
        found = self.tokens[:, self.depth - 1 : self.depth]
        return DraftStep(
            depth=self.depth,
            tokens=found,
            distributions=None,
            path_log_prob=torch.zeros(found.shape, device=found.device),
            rows=self.state.rows,
            active=send(self.alive, found.device)[:, None],
        )

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        for row, count in enumerate(self.counts):
            wanted = go_on is True or go_on[row][0]
            self.alive[row] = self.alive[row] and wanted and count > self.depth
            self.kept[row] += self.alive[row]
        if not any(self.alive):
            return False
        self.depth += 1
        return True

    def finish(self) -> DraftTree:
        found = self.tokens[:, : self.depth]
        kept = send(self.kept, found.device)[:, None]
        return DraftTree.chain(found, torch.arange(self.depth, device=found.device) < kept)

    @staticmethod
    def look_up(params: NgramDrafter.Params, state: GenerationState) -> tuple[Tensor, Tensor]:
        """Proposed tokens `[B, L]` and how many of them each row has `[B]`, on the state's device."""
        longest = min(params.num_tokens, max(state.limits))
        ids, width = state.ids[:, : max(state.lengths)], max(state.lengths)
        lengths = state.last_positions[:, None] + 1
        positions = torch.arange(width, device=ids.device)
        # score[b, i]: how many of the tokens that end at position i equal those that end the text.
        score = torch.zeros_like(ids)
        running = torch.ones_like(ids, dtype=torch.bool)
        for back in range(min(params.max_ngram, width - 1)):
            last = ids.gather(1, (lengths - 1 - back).clamp_min(0))
            here = torch.where(positions >= back, ids.roll(back, 1), -1)
            running = running & (here == last) & (lengths > back + 1)
            score = score + running
        usable = (positions < lengths - 1) & (score >= params.min_ngram)
        best = torch.where(usable, score * width + positions, -1).max(1)
        start = best.indices[:, None] + 1
        # Behind the end of the text the copy reads what it has copied: a loop goes on as a loop.
        span = (lengths - start).clamp_min(1)
        index = start + torch.arange(longest, device=ids.device) % span
        limits = send(state.limits, ids.device).clamp_max(longest)
        counts = torch.where(best.values >= 0, limits, 0)
        return ids.gather(1, index.clamp_max(width - 1)), counts
