"""SVIP: stop when the drafter's own entropy says that acceptance has become unlikely."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from specdec.draft import DraftStep
from specdec.params import Params as ParamsBase
from specdec.policies.base import LengthPolicy


class SVIPPolicy(LengthPolicy):
    r"""Stop after a token when `sqrt(scale · H(q)) > threshold`; the token itself is kept.

    A token drawn from the drafter's `q` is accepted by the target's `p` with probability
    `β = 1 - TV(p, q)`. Pinsker's inequality gives `TV ≤ sqrt(KL(q‖p) / 2)`, and
    `KL(q‖p) = H(q, p) - H(q)`. With the cross-entropy taken as a constant multiple of the entropy,
    `H(q, p) ≈ r · H(q)`, the bound is `β ≥ 1 - sqrt((r - 1) / 2 · H(q))`: the drafter's entropy
    alone bounds acceptance from below, with no look at the target and no training. `scale` is
    `(r - 1) / 2`; the published code uses 0.15 (r = 1.3) and `threshold` 0.3, which stops at
    `H > 0.6` nats, and at most 40 drafted tokens.

    `H` is taken from the raw draft logits, without temperature, also when sampling at another one.

    On a chain the distribution is the one that the token was drawn from. The paper reports EAGLE-2
    with SVIP but its code for trees was never published. Here a tree follows the same rule branch
    by branch: a node is kept and not extended when the distribution that it was drawn from (the one
    at its parent) fails the test, so a tree with one branch is exactly the chain, and no head pass
    is spent on a branch that stops. Siblings share that distribution and so stop together; the round
    ends when no branch is left.

    Source: Zhang et al. 2024, "Draft Model Knows When to Stop" (arXiv 2411.18462).
    """

    summary = "stop when the entropy bound on acceptance falls too low"
    source = "arXiv 2411.18462"

    class Params(ParamsBase):
        threshold: float = Field(
            0.3, gt=0, description="stop when sqrt(scale * entropy) exceeds this"
        )
        scale: float = Field(0.15, gt=0, description="factor on the entropy (nats) in the bound")
        max_length: int = Field(40, ge=1, description="never more than this many drafted tokens")

    def keep_drafting(self, step: DraftStep) -> Tensor | bool:
        if step.depth >= self.params.max_length:
            return False
        return (self.params.scale * step.entropy).sqrt() <= self.params.threshold
