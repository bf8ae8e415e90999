"""Path: stop when the draft as a whole has become improbable."""

from __future__ import annotations

import math

from pydantic import Field
from torch import Tensor

import specdec
from specdec import DraftStep, LengthPolicy


class PathPolicy(LengthPolicy):
    """Stop a branch when the drafter's own probability of its whole path falls below `threshold`.

    Confidence looks at the newest token alone; this one multiplies along the path, as a draft is
    only worth as much as all of its tokens together. On a tree each branch is judged by itself.
    """

    summary = "stop when the whole draft has become improbable"
    source = "a template for plugins"

    class Params(specdec.Params):
        threshold: float = Field(0.3, gt=0, le=1, description="stop below this probability")
        max_length: int = Field(20, ge=1, description="never more than this many drafted tokens")

    def keep_drafting(self, step: DraftStep) -> Tensor | bool:
        if step.depth >= self.params.max_length:
            return False  # a plain answer, where no tensor is needed, costs no synchronisation
        return step.path_log_prob >= math.log(self.params.threshold)
