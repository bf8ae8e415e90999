"""Confidence: stop when the drafter's top token is not probable enough."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from specdec.draft import DraftStep
from specdec.params import Params as ParamsBase
from specdec.policies.base import LengthPolicy


class ConfidencePolicy(LengthPolicy):
    """Stop after a token when the top probability of its distribution is below `threshold`.

    The top probability, not the drawn token's: it is the same thing for a greedy draft, and for a
    sampled one it does not depend on which token was drawn. Taken from the untempered distribution.

    Source: transformers, `assistant_confidence_threshold` (default 0.4, at most 20 tokens).
    """

    summary = "stop when the drafter's top probability is below a threshold"
    source = "transformers' assisted generation"

    class Params(ParamsBase):
        threshold: float = Field(0.4, ge=0, le=1, description="stop below this top probability")
        max_length: int = Field(20, ge=1, description="never more than this many drafted tokens")

    def keep_drafting(self, step: DraftStep) -> Tensor | bool:
        if step.depth >= self.params.max_length:
            return False
        return step.top_prob >= self.params.threshold
