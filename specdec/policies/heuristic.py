"""Heuristic: grow after full acceptance, shrink otherwise."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from specdec.draft import DraftStep, RoundOutcome
from specdec.params import Params as ParamsBase
from specdec.policies.base import LengthPolicy


class HeuristicPolicy(LengthPolicy):
    """Two tokens more after a round in which all drafted tokens were accepted, else one fewer.

    The schedule of transformers' assisted generation, kept for each row and for one generation
    only. A draft that ended because the text had to end is no sign of full acceptance: such rounds
    leave the length as it is. On a tree a round counts as fully accepted when the accepted path is
    as long as the longest drafted one.

    Source: transformers, `num_assistant_tokens_schedule="heuristic"`; `max_length` as in the SVIP
    paper's baseline (arXiv 2411.18462).
    """

    summary = "+2 tokens after full acceptance, else -1"
    source = "transformers' assisted generation"

    class Params(ParamsBase):
        initial: int = Field(5, ge=1, description="drafted tokens in the first round")
        max_length: int = Field(40, ge=1, description="never more than this many drafted tokens")

    def start(self, batch_size: int) -> None:
        self.lengths = [min(self.params.initial, self.params.max_length)] * batch_size

    def keep_drafting(self, step: DraftStep) -> Tensor:
        # Known on the host: the answer needs no synchronisation with the device.
        wanted = torch.tensor([self.lengths[row] for row in step.rows])
        return (step.depth < wanted)[:, None].expand(step.tokens.shape)

    def observe(self, outcome: RoundOutcome) -> None:
        for row, accepted, drafted, cut in zip(
            outcome.rows, outcome.accepted, outcome.draft_length, outcome.cut, strict=True
        ):
            if cut or drafted == 0:
                continue
            change = 2 if accepted == drafted else -1
            self.lengths[row] = min(max(1, self.lengths[row] + change), self.params.max_length)
