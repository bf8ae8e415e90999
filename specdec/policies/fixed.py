"""Fixed: the same number of tokens in every round."""

from __future__ import annotations

from pydantic import Field

from specdec.draft import DraftStep
from specdec.params import Params as ParamsBase
from specdec.policies.base import LengthPolicy


class FixedPolicy(LengthPolicy):
    """Draft `length` tokens (levels, on a tree) in every round: the classic γ.

    With a tree drafter of `depth` d, `length = d + 1` grows the whole tree of the official
    EAGLE-2 code.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """

    summary = "the same number of drafted tokens in every round"
    source = "arXiv 2211.17192"

    class Params(ParamsBase):
        length: int = Field(5, ge=1, description="drafted tokens a round (levels, on a tree)")

    def keep_drafting(self, step: DraftStep) -> bool:
        return step.depth < self.params.length
