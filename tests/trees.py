"""Random draft trees."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specdec.draft import ROOT, DraftTree


def random_tree(
    rng: random.Random, batch: int, size: int, vocab: int, proposals: Tensor | None = None
) -> DraftTree:
    """A tree of another shape in every row, with padding, wide or deep.

    Args:
        size: nodes of the widest row.
        proposals: `[B, size + 1, V]` distributions behind the root and every node; with them some
            children are sampled ones (whatever their tokens are).
    """
    rows = [_shape(rng, rng.randint(0, size)) for _ in range(batch)]
    parents = torch.full((batch, size), ROOT)
    valid = torch.zeros(batch, size, dtype=torch.bool)
    sampled = torch.zeros(batch, size, dtype=torch.bool)
    for row, shape in enumerate(rows):
        for node, parent in enumerate(shape):
            parents[row, node] = parent
            valid[row, node] = True
            # Among siblings the sampled ones come first.
            before = [sampled[row, other] for other in range(node) if shape[other] == parent]
            sampled[row, node] = proposals is not None and rng.random() < 0.6 and all(before)
    tokens = torch.tensor([[rng.randrange(vocab) for _ in range(size)] for _ in rows]).long()
    families = [
        [sum(bool(sampled[row, node]) for node, up in enumerate(shape) if up == parent)
         for parent in shape]
        for row, shape in enumerate(rows)
    ]  # fmt: skip
    return DraftTree(
        tokens.reshape(batch, size),
        parents,
        valid,
        depth=max(
            (path_length(shape, node) for shape in rows for node in range(len(shape))), default=0
        ),
        sampled=None if proposals is None else sampled,
        proposals=proposals,
        proposal=None if proposals is None else parents + 1,
        max_sampled=max((count for row in families for count in row), default=0),
    )


def _shape(rng: random.Random, size: int) -> list[int]:
    reach = rng.choice([1, 2, size + 1])
    return [rng.randint(max(ROOT, node - reach), node - 1) for node in range(size)]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root's child down to `node`."""
    return [] if node == ROOT else [*path_to(parents, parents[node]), node]


def path_length(parents: list[int], node: int) -> int:
    return len(path_to(parents, node))
