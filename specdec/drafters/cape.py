"""CaPE: more candidates for a drafted token, the less sure the drafter is of it.

Source: Du et al. 2024, "GliDe with a CaPE" (arXiv 2402.02082).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from specdec.draft import DraftStep, DraftTree
from specdec.drafters.base import Drafter
from specdec.drafters.expansion import Expansion
from specdec.errors import SpecdecError
from specdec.host import send
from specdec.state import GenerationState


class CapeDrafter(Expansion):
    """Confidence-aware proposal expansion: side candidates beside each token of a drafted chain.

    The top probability `p` of the distribution that a token came from says how many candidates
    there are at its position, the chain's own token included: `candidates[i]` for the first
    `thresholds[i]` above `p`, the last entry where there is none. The others are the next most
    probable tokens: leaves with the same prefix, never extended. The length policy sees the chain
    alone and works on it as it would without CaPE.

    Under temperature the chain's token is a sampled child, and the side candidates are fixed ones,
    tried after it against the residual. (The published results and the published code that runs are
    greedy.)

    Source: Du et al. 2024 (arXiv 2402.02082); the default table is the published one.
    """

    summary = "more candidates where a drafted chain is unsure"
    source = "arXiv 2402.02082"

    class Params(Expansion.Params):
        thresholds: list[float] = Field(
            [0.3, 0.6, 0.8], description="rising top probabilities that part the confidence levels"
        )
        candidates: list[int] = Field(
            [8, 6, 4, 2],
            description="candidates at each level, the chain's own token included",
            validate_default=True,
        )

        @field_validator("thresholds")
        @classmethod
        def _rise(cls, thresholds: list[float]) -> list[float]:
            if thresholds != sorted(set(thresholds)):
                raise PydanticCustomError("thresholds", "thresholds must rise")
            return thresholds

        @field_validator("candidates")
        @classmethod
        def _one_a_level(cls, candidates: list[int], found: ValidationInfo) -> list[int]:
            levels = len(found.data.get("thresholds", candidates[1:])) + 1
            if len(candidates) != levels:
                told = f"{levels - 1} thresholds part {levels} levels: give as many candidates"
                raise PydanticCustomError("candidates", told)
            if min(candidates) < 1:
                told = "the chain's own token is one of them, so each is at least 1"
                raise PydanticCustomError("candidates", told)
            return candidates

    def check_base(self, base: Drafter | None) -> Drafter:
        if base is None or not base.proposes_chain:
            name = "plain decoding" if base is None else type(base).__name__
            raise SpecdecError(
                "drafter.base: cape widens a chain of tokens that come from distributions, and "
                f"{name} proposes none; use autoregressive, glide, or eagle2 with chain: true."
            )
        return base

    def begin(self, state: GenerationState) -> None:
        super().begin(state)
        self.steps: list[DraftStep] = []
        self.distributions: list[Tensor] = []
        self._follow()

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        extended = super().extend(go_on)
        if extended:
            self._follow()
        return extended

    def finish(self) -> DraftTree:
        chain = self.base.finish()
        logits = torch.cat(self.distributions, dim=1)
        top_prob = torch.cat([step.top_prob for step in self.steps], dim=1)
        width = min(max(self.params.candidates), logits.shape[-1])
        best = self.base.vocabulary.to_target(logits.topk(width, dim=-1).indices)
        return widen(chain, best, self._wanted(top_prob))

    def _follow(self) -> None:
        step = self.base.step()
        assert step is not None
        assert step.distributions is not None, "proposes_chain promises distributions"
        self.steps.append(step)
        self.distributions.append(step.distributions)

    def _wanted(self, top_prob: Tensor) -> Tensor:
        """Candidates at each position, `[B, D]`, from the top probabilities `[B, D]`."""
        thresholds = send(self.params.thresholds, top_prob.device)
        table = send(self.params.candidates, top_prob.device)
        return table[torch.bucketize(top_prob, thresholds, right=True)]


def widen(chain: DraftTree, best: Tensor, wanted: Tensor) -> DraftTree:
    """Hang side candidates beside the nodes of a chain.

    The chain's nodes stay where they are (indices 0 to D - 1) and so stand before their siblings.

    Args:
        chain: D nodes.
        best: `[B, D, K]` the most probable tokens at each position, best first.
        wanted: `[B, D]` candidates at each position, the chain's own included.
    """
    others = best != chain.tokens[..., None]
    beside = others & (others.cumsum(-1) < wanted[..., None]) & chain.valid[..., None]
    parents = chain.parents[..., None].expand(best.shape).flatten(1)
    tokens, valid = best.flatten(1), beside.flatten(1)
    if tokens.device.type == "cpu":
        # Looking costs nothing on the host's own memory, and saves the target the padding. On an
        # accelerator the padding is cheaper than a synchronisation.
        order = (~valid).int().argsort(dim=1, stable=True)[:, : int(valid.sum(1).max())]
        tokens, parents, valid = (kind.gather(1, order) for kind in (tokens, parents, valid))
    return chain.with_fixed(tokens, parents, valid, chain.depth)
