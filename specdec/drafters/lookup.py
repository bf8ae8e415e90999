"""Lookup: beside a drafter's own guesses, what followed the last time the text said this."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from specdec.draft import ROOT, DraftTree
from specdec.drafters.base import Drafter
from specdec.drafters.expansion import Expansion
from specdec.drafters.ngram import NgramDrafter
from specdec.errors import SpecdecError
from specdec.state import GenerationState


class LookupDrafter(Expansion):
    """Adds the continuation of the longest earlier match to another drafter's tree.

    A drafter that was trained guesses what is new, and prompt lookup what is copied: quotations, names
    and numbers out of the prompt, code. One pass of the target checks both. As far as the drafter's
    tree says the same as the copy, the copy goes on from there; what is added are point masses,
    tried after the drafter's own children. The length policy sees the drafter's part alone.

    Source: prompt lookup decoding (Saxena 2023); a copy beside a drafter's tree, SAM Decoding
    (arXiv 2411.10666), which chooses one of the two where this one checks both.
    """

    summary = "the text's own earlier continuation beside any drafter's tree"
    source = "prompt lookup decoding (Saxena 2023), arXiv 2411.10666"

    class Params(NgramDrafter.Params, Expansion.Params):
        max_ngram: int = Field(4, ge=1, description="longest run of tokens to look up")
        num_tokens: int = Field(8, ge=1, description="at most this many tokens are copied")

    def check_base(self, base: Drafter | None) -> Drafter:
        if base is None:
            raise SpecdecError(
                "drafter.base: lookup adds to another drafter's tree, and plain decoding has none; "
                "use the drafter ngram for copies alone."
            )
        return base

    def begin(self, state: GenerationState) -> None:
        super().begin(state)
        self.state = state

    def finish(self) -> DraftTree:
        tree = self.base.finish().to(self.state.device)
        return graft(tree, *NgramDrafter.look_up(self.params, self.state))


def graft(tree: DraftTree, copied: Tensor, counts: Tensor) -> DraftTree:
    """Add a path of fixed nodes from the root; what the tree holds of its beginning is not added.

    Args:
        tree: N nodes, which stay where they are.
        copied: `[B, L]` tokens of the path.
        counts: `[B]` how many of them each row has.
    """
    batch, length = copied.shape
    node = torch.full_like(counts, ROOT)
    shared = torch.zeros_like(counts)
    for level in range(min(tree.depth, length)):
        same = tree.tokens == copied[:, level, None]
        same &= tree.valid & (tree.parents == node[:, None])
        onward = same.any(1) & (shared == level) & (counts > level)
        node = torch.where(onward, same.int().argmax(1), node)
        shared = shared + onward
    left = counts - shared
    if copied.device.type == "cpu":
        # Looking costs nothing on the host's own memory, and saves the target the padding.
        length = int(left.max())
    index = torch.arange(length, device=copied.device).expand(batch, -1)
    behind = torch.where(index == 0, node[:, None], tree.size + index - 1)
    place = (shared[:, None] + index).clamp_max(copied.shape[1] - 1)
    depth = max(tree.depth, copied.shape[1])
    return tree.with_fixed(copied.gather(1, place), behind, index < left[:, None], depth)
