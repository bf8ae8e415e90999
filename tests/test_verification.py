"""The walk down a tree against a slow and obvious one, with the same random numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft import ROOT, DraftTree
from specdec.verification import Verdict, verify
from tests.trees import path_to, random_tree

VOCAB = 5
Case = tuple[int, int, int]


class PrescribedSampler:
    """Random numbers from tables, instead of a generator; scores are the logits.

    Attributes:
        uniforms: `[levels, ranks, B]` for the tests of sampled children.
        draws: `[levels, B]` for the draws of tokens.
        asked: the drafted prefixes `[B, level]` that scores were asked for.
        drawn_from: the distributions `[B, V]` that tokens were drawn from, level by level.
    """

    def __init__(self, do_sample: bool, uniforms: Tensor, draws: Tensor) -> None:
        self.do_sample = do_sample
        self.uniforms, self.draws = uniforms, draws
        self.asked: list[Tensor] = []
        self.drawn_from: list[Tensor] = []

    def scores(self, logits: Tensor, state: Any, path: Tensor) -> Tensor:
        self.asked.append(path)
        self.rank = 0
        return logits

    def uniform(self, like: Tensor) -> Tensor:
        self.rank += 1
        return self.uniforms[len(self.asked) - 1, self.rank - 1]

    def multinomial(self, probs: Tensor) -> Tensor:
        self.drawn_from.append(probs)
        return invert(probs, self.draws[len(self.asked) - 1])


def invert(probs: Tensor, at: Tensor) -> Tensor:
    """The token whose share of [0, 1) holds `at`."""
    return (probs.cumsum(-1) <= at[..., None]).sum(-1).clamp_max(probs.shape[-1] - 1)


def reference(
    tree: DraftTree, logits: Tensor, row: int, sampler: PrescribedSampler
) -> tuple[list[int], list[int], dict[int, Tensor]]:
    """Accepted nodes and committed tokens of one row, straight from the rules.

    Also what was left of `p` at the levels where no sampled child was accepted.
    """
    node, nodes, tokens, left = ROOT, [], [], {}
    while True:
        level = len(nodes)
        p = torch.softmax(logits[row, node + 1], dim=-1)
        children = [
            child
            for child in range(tree.size)
            if tree.valid[row, child] and tree.parents[row, child] == node
        ]
        if sampler.do_sample:
            child, p = try_sampled(tree, row, children, p, sampler.uniforms[level, :, row])
            token = int(invert(p, sampler.draws[level, row]))
            if child is None:
                left[level] = p
        else:
            child, token = None, int(p.argmax())
        if child is None:
            for other in children:
                is_fixed = (
                    tree.sampled is None or not sampler.do_sample or not tree.sampled[row, other]
                )
                if is_fixed and tree.tokens[row, other] == token:
                    child = other
                    break
        if child is None:
            return nodes, [*tokens, token], left
        nodes.append(child)
        tokens.append(int(tree.tokens[row, child]))
        node = child


def try_sampled(
    tree: DraftTree, row: int, children: list[int], p: Tensor, uniforms: Tensor
) -> tuple[int | None, Tensor]:
    if tree.sampled is None:
        return None, p
    q, rank = None, 0
    for child in children:
        if not tree.sampled[row, child]:
            continue
        if q is None:
            q = tree.proposals[row, tree.proposal[row, child]].clone()
        x = tree.tokens[row, child]
        if q[x] > 0:
            if uniforms[rank] < min(1.0, p[x] / q[x]):
                return child, p
            left = (p - q).clamp_min(0)
            p = left / left.sum() if left.sum() > 0 else p
        without = q.clone()
        without[x] = 0
        if without.sum() > 0:
            q = without / without.sum()
        rank += 1
    return None, p


def make(case: Case, do_sample: bool) -> tuple[DraftTree, Tensor, PrescribedSampler]:
    seed, batch, size = case
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, size + 1, VOCAB, generator=draw, dtype=torch.float64)
    # Tokens that a processor has banned, in p and in q.
    logits[torch.rand(logits.shape, generator=draw) < 0.2] = -torch.inf
    logits[..., 0] = 0
    other = 2 * torch.randn(logits.shape, generator=draw, dtype=torch.float64)
    other[torch.rand(logits.shape, generator=draw) < 0.3] = -torch.inf
    other[..., rng.randrange(VOCAB)] = 0
    tree = random_tree(rng, batch, size, VOCAB, other.softmax(-1) if do_sample else None)
    levels = size + 1
    uniforms = torch.rand(levels, size + 1, batch, generator=draw, dtype=torch.float64)
    draws = torch.rand(levels, batch, generator=draw, dtype=torch.float64)
    return tree, logits, PrescribedSampler(do_sample, uniforms, draws)


def walk(tree: DraftTree, logits: Tensor, sampler: Any, **options: Any) -> Verdict:
    return verify(tree, logits, sampler, None, **options)  # type: ignore[arg-type]


CASES = st.tuples(st.integers(0, 2**32), st.integers(1, 5), st.integers(6, 10))


@settings(max_examples=150, deadline=None)
@given(CASES, st.booleans())
def test_every_row_is_walked_by_the_rules(case: Case, do_sample: bool) -> None:
    tree, logits, sampler = make(case, do_sample)
    verdict = walk(tree, logits, sampler)
    for row in range(case[1]):
        nodes, tokens, left = reference(tree, logits, row, sampler)
        accepted = len(nodes)
        assert verdict.accepted[row] == accepted
        assert verdict.tokens[row, : accepted + 1].tolist() == tokens
        assert verdict.path[row, : accepted + 1].tolist() == [0, *(node + 1 for node in nodes)]
        # Entries behind are the last node again: moving them about in a cache is harmless.
        assert set(verdict.path[row, accepted:].tolist()) == {verdict.path[row, accepted].item()}
        for level in range(accepted + 1):
            assert sampler.asked[level][row].tolist() == tokens[:level]
        for level, p in left.items():
            torch.testing.assert_close(sampler.drawn_from[level][row], p)


@settings(max_examples=30, deadline=None)
@given(CASES)
def test_scores_are_those_of_the_nodes_that_were_walked(case: Case) -> None:
    tree, logits, sampler = make(case, do_sample=True)
    verdict = walk(tree, logits, sampler, keep_scores=True)
    for row in range(case[1]):
        for level in range(int(verdict.accepted[row]) + 1):
            scores, raw = verdict.scores[level]
            node = verdict.path[row, level]
            assert torch.equal(scores[row], logits[row, node])
            assert torch.equal(raw[row], logits[row, node].float())


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_the_geometry_of_a_tree(case: Case) -> None:
    """`ancestors` and `depths`, which make the target's mask and positions."""
    tree, _, _ = make(case, do_sample=False)
    for row in range(case[1]):
        parents = tree.parents[row].tolist()
        for node in range(tree.size):
            if not tree.valid[row, node]:
                continue
            path = path_to(parents, node)
            assert tree.depths[row, node + 1] == len(path)
            seen = tree.ancestors[row, node + 1].nonzero()[:, 0].tolist()
            assert seen == sorted([0, *(each + 1 for each in path)])


def test_a_round_without_a_draft() -> None:
    logits = torch.tensor([[[0.0, 3.0, 1.0]], [[2.0, 0.0, 1.0]]])
    sampler = PrescribedSampler(False, torch.zeros(1, 1, 2), torch.zeros(1, 2))
    verdict = walk(DraftTree.empty(2, torch.device("cpu")), logits, sampler)
    assert verdict.accepted.tolist() == [0, 0]
    assert verdict.tokens.tolist() == [[1], [0]]


@pytest.mark.parametrize("overflow", [torch.nan, torch.inf])
def test_a_proposal_that_is_no_distribution_is_never_accepted(overflow: float) -> None:
    """As from a drafter whose logits overflowed: its tokens are passed over, `p` stays what it is."""
    proposals = torch.full((1, 1, 3), overflow)
    tree = DraftTree.chain(torch.tensor([[1]]), torch.tensor([[True]]), proposals)
    logits = torch.zeros(1, 2, 3)
    sampler = PrescribedSampler(True, torch.zeros(2, 2, 1), torch.tensor([[0.5], [0.5]]))
    verdict = walk(tree, logits, sampler)
    assert verdict.accepted.tolist() == [0]
    assert verdict.tokens[0, 0] == 1
