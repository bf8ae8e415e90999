"""The acceptance rules: greedy, and lossless sampling, over chains and trees.

`p` is the target's processed distribution at a node, `q` the processed distribution a sampled child
was drawn from. Children of a node are tried in their order:

- a sampled child `x ~ q` is accepted with probability `min(1, p(x) / q(x))`; after a rejection
  `p <- normalise(max(p - q, 0))`, and `q` without `x`, renormalised, is what its next sampled
  sibling was drawn from;
- a fixed child `x` is accepted with probability `p(x)`; after a rejection `p(x) <- 0`, renormalised.

If none is accepted the bonus token is drawn from what `p` has become; at a leaf, from `p` itself.

Trying the fixed children one after the other is the same as drawing `y ~ p` once: the child that
equals `y` is accepted, and if there is none `y` is the bonus token. So every level costs one draw, and
greedy decoding is the same walk with `y = argmax p`. The walk runs for all rows at once and reads
nothing back to the host.

Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318); sampling without
replacement as in Jeon et al. 2024 (arXiv 2402.14160); point masses as in EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.draft import DraftTree
from specdec.sampling import Sampler
from specdec.state import GenerationState


@dataclass
class Verdict:
    """What the target makes of a draft; everything on the device, for all rows at once.

    Attributes:
        path: `[B, D + 1]` nodes of the accepted path, the root (0) first, node i + 1 for the
            tree's node i; entries past `accepted` repeat the last node.
        tokens: `[B, D + 1]` accepted tokens, then the bonus token at index `accepted`.
        accepted: `[B]` number of accepted draft tokens.
        scores: per level the target's processed scores and raw logits `[B, V]`, when asked for.
    """

    path: Tensor
    tokens: Tensor
    accepted: Tensor
    scores: list[tuple[Tensor, Tensor]]


def verify(
    tree: DraftTree,
    logits: Tensor,
    sampler: Sampler,
    state: GenerationState,
    keep_scores: bool = False,
) -> Verdict:
    """Walk down the tree, level by level, until no child is accepted.

    Args:
        logits: `[B, N + 1, V]` the target's raw logits at the root and at every node.
    """
    batch, device = tree.tokens.shape[0], logits.device
    every = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.long, device=device)
    open_ = torch.ones(batch, dtype=torch.bool, device=device)
    accepted = torch.zeros(batch, dtype=torch.long, device=device)
    path, kept = [node], []
    tokens: list[Tensor] = []
    for level in range(tree.depth + 1):
        drafted = torch.stack(tokens, 1) if tokens else node.new_zeros(batch, 0)
        raw = logits[every, node]
        scores = sampler.scores(raw, state, drafted)
        if keep_scores:
            kept.append((scores, raw.float()))
        child, token = _choose(tree, node, scores, sampler)
        # A row that has stopped keeps its bonus token: later levels write behind it.
        tokens.append(token)
        if level == tree.depth:
            break
        open_ = open_ & (child >= 0)
        node = torch.where(open_, child + 1, node)
        accepted = accepted + open_
        path.append(node)
        # On the host's own memory looking is free, and most walks end early.
        if device.type == "cpu" and not open_.any():
            break
    return Verdict(torch.stack(path, 1), torch.stack(tokens, 1), accepted, kept)


def _choose(
    tree: DraftTree, node: Tensor, scores: Tensor, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """The accepted child of each row's node (-1 for none) `[B]`, and the next token `[B]`."""
    children = tree.valid & (tree.parents == node[:, None] - 1)
    if not sampler.do_sample:
        token = scores.argmax(-1)
        return _matching(children, tree.tokens, token), token
    p = torch.softmax(scores, dim=-1)
    taken = torch.full_like(node, -1)
    fixed = children
    if tree.sampled is not None:
        taken, p = _try_sampled(tree, children & tree.sampled, p, sampler)
        fixed = children & ~tree.sampled
    token = sampler.multinomial(p)
    child = torch.where(taken >= 0, taken, _matching(fixed, tree.tokens, token))
    if tree.size:
        chosen = tree.tokens.gather(1, child.clamp_min(0)[:, None])[:, 0]
        token = torch.where(child >= 0, chosen, token)
    return child, token


def _try_sampled(
    tree: DraftTree, children: Tensor, p: Tensor, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """Try sampled children in order: the accepted one (-1 for none) `[B]`, and the residual `p`."""
    assert tree.proposals is not None
    assert tree.proposal is not None
    every = torch.arange(len(p), device=p.device)
    taken = torch.full((len(p),), -1, dtype=torch.long, device=p.device)
    order = children.cumsum(1)
    q = None
    for rank in range(1, tree.max_sampled + 1):
        this = children & (order == rank)
        child = this.int().argmax(1)
        x = tree.tokens[every, child]
        if q is None:
            q = tree.proposals[every, tree.proposal[every, child]]
        p_x, q_x = p[every, x], q[every, x]
        # A child whose probability is 0 was not drawn: there was nothing left to draw.
        trying = this.any(1) & (taken < 0) & (q_x > 0)
        accept = trying & (sampler.uniform(p_x) * q_x < p_x)
        taken = torch.where(accept, child, taken)
        p = torch.where((trying & ~accept)[:, None], _residual(p, q), p)
        if rank < tree.max_sampled:
            q = _normalise(q.scatter(1, x[:, None], 0.0), q)
    return taken, p


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """`normalise(max(p - q, 0))`. Where nothing is left, p equals q up to rounding: p stays."""
    return _normalise((p - q).clamp_min_(0), p)


def _normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def _matching(children: Tensor, tokens: Tensor, token: Tensor) -> Tensor:
    """First child `[B]` that carries `token [B]`; -1 where there is none."""
    if not tokens.shape[1]:
        return torch.full_like(token, -1)
    hit = children & (tokens == token[:, None])
    return torch.where(hit.any(1), hit.int().argmax(1), -1)
