"""Lookup: a copied path in any drafter's tree."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from specdec import SpecdecError, SpeculativeDecoder
from specdec.draft import ROOT, DraftTree
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.cape import CapeDrafter
from specdec.drafters.lookup import LookupDrafter, graft
from specdec.policies import FixedPolicy, SVIPPolicy
from tests import law, tiny
from tests.drafters import eagle2

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 7, 8, 9]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny.llama()


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    return law.tiny_llama()


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The token paths from the root to every real node; no two nodes may have the same one."""
    found: list[tuple[int, ...]] = []
    for node in range(tree.size):
        up, token = int(tree.parents[row, node]), int(tree.tokens[row, node])
        real = bool(tree.valid[row, node])
        assert not real or up == ROOT or tree.valid[row, up], "a parent is real"
        found.append((*(() if up == ROOT else found[up]), token))
    kept = [path for path, real in zip(found, tree.valid[row].tolist(), strict=True) if real]
    assert len(kept) == len(set(kept))
    return set(kept)


def random_tree(draw: random.Random, batch: int, size: int) -> DraftTree:
    """Rows of different sizes; the children of a node carry different tokens."""
    tokens, parents, depths = ([[] for _ in range(batch)] for _ in range(3))
    for row in range(batch):
        taken = set()
        for node in range(size):
            while True:
                up, token = draw.randint(-1, node - 1), draw.randrange(3)
                if (up, token) not in taken:
                    break
            taken.add((up, token))
            parents[row].append(up)
            tokens[row].append(token)
            depths[row].append(1 if up == ROOT else depths[row][up] + 1)
    real = [
        [node < count for node in range(size)] for count in draw.choices(range(size + 1), k=batch)
    ]
    return DraftTree(
        torch.tensor(tokens), torch.tensor(parents), torch.tensor(real), depth=max(map(max, depths))
    )


def test_the_tree_becomes_the_union() -> None:
    draw = random.Random(0)
    shared_at_all = 0
    for _ in range(300):
        batch, length = draw.randint(1, 3), draw.randint(1, 5)
        tree = random_tree(draw, batch, draw.randint(1, 9))
        copied = torch.tensor([draw.choices(range(3), k=length) for _ in range(batch)])
        counts = torch.tensor(draw.choices(range(length + 1), k=batch))
        grown = graft(tree, copied, counts)
        assert torch.equal(grown.tokens[:, : tree.size], tree.tokens)
        for row in range(batch):
            path = copied[row, : counts[row]].tolist()
            added = {tuple(path[:end]) for end in range(1, len(path) + 1)}
            before = paths(tree, row)
            assert paths(grown, row) == before | added
            shared_at_all += len(before & added)
        assert grown.depth >= int((grown.depths[:, 1:] * grown.valid).max())
    assert shared_at_all > 50


@pytest.mark.parametrize("sample", [False, True])
def test_what_was_sampled_stays_sampled(sample: bool) -> None:
    tokens = torch.tensor([[2, 1]])
    proposals = torch.full((1, 2, 4), 0.25) if sample else None
    chain = DraftTree.chain(tokens, torch.ones(1, 2).bool(), proposals)
    tree = graft(chain, torch.tensor([[2, 3, 0]]), torch.tensor([3]))
    assert tree.tokens.tolist() == [[2, 1, 3, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2]]
    if not sample:
        assert tree.sampled is None
    else:
        assert tree.sampled.tolist() == [[True, True, False, False]]
        assert tree.proposal[0, :2].tolist() == [0, 1]
        assert tree.max_sampled == 1


def test_nothing_to_add_changes_nothing() -> None:
    chain = DraftTree.chain(torch.tensor([[2, 1]]), torch.ones(1, 2).bool())
    assert graft(chain, torch.tensor([[2, 1, 0]]), torch.tensor([2])) is chain


def test_a_copy_is_accepted_that_the_drafter_did_not_guess(target: PreTrainedModel) -> None:
    """A drafter that knows nothing, on a text that repeats itself."""
    stranger = {"name": "autoregressive", "model": tiny.llama(seed=9)}
    text = SpeculativeDecoder(target).generate([PROMPT], max_new_tokens=60).token_ids[0]
    prompt = PROMPT + text + PROMPT
    expected = SpeculativeDecoder(target).generate([prompt], max_new_tokens=60)
    alone = SpeculativeDecoder(target, stranger).generate([prompt], max_new_tokens=60)
    decoder = SpeculativeDecoder(target, {**stranger, "expand": "lookup"})
    assert isinstance(decoder.drafter, LookupDrafter)
    assert isinstance(decoder.drafter.base, AutoregressiveDrafter)
    both = decoder.generate([prompt], max_new_tokens=60)
    assert both.token_ids == alone.token_ids == expected.token_ids
    assert both.statistics.rounds < alone.statistics.rounds


def test_no_path_is_longer_than_the_budget(target: PreTrainedModel) -> None:
    decoder = SpeculativeDecoder(target, LookupDrafter(base=eagle2(target)))
    output = decoder.generate([PROMPT * 3], max_new_tokens=12)
    left = 11
    for record in output.rounds:
        assert record.draft_length[0] < left
        left -= record.committed[0]
    assert left == 0


def test_plain_decoding_is_no_base() -> None:
    with pytest.raises(
        SpecdecError, match=r"drafter\.base: lookup adds to .* use the drafter ngram"
    ):
        LookupDrafter(base="none")


def test_lengths_must_be_ordered() -> None:
    with pytest.raises(SpecdecError, match=r"min_ngram \(5\) must not exceed max_ngram \(4\)"):
        LookupDrafter(base="ngram", min_ngram=5)


class TestSampling:
    """The copies are point masses behind the drafter's own children, whatever those are."""

    @pytest.mark.parametrize("policy", [FixedPolicy(length=3), SVIPPolicy(threshold=0.6)])
    @pytest.mark.parametrize("wide", [False, True], ids=["chain", "cape"])
    def test_on_a_sampled_chain(self, small, wide, policy) -> None:
        base = AutoregressiveDrafter(model=tiny.noisy(small, 0.5))
        if wide:
            base = CapeDrafter(base=base, thresholds=[0.3], candidates=[3, 2])
        drafter = LookupDrafter(base=base)
        law.assert_lossless(SpeculativeDecoder(small, drafter, policy), calls=2)

    @pytest.mark.parametrize("sample", [False, True])
    def test_on_a_tree(self, small, sample) -> None:
        base = eagle2(small, sample=sample, top_k=3, total_tokens=12)
        drafter = LookupDrafter(base=base)
        law.assert_lossless(SpeculativeDecoder(small, drafter), calls=2)
