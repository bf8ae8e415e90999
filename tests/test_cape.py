"""CaPE: side candidates beside a drafted chain, whatever drafts it."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from specdec import SpecdecError, SpeculativeDecoder
from specdec.cache import SlotCache
from specdec.draft import DraftTree
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.cape import CapeDrafter, widen
from specdec.model import CachedModel
from specdec.policies import ConfidencePolicy, FixedPolicy, HeuristicPolicy, SVIPPolicy
from tests import law, tiny
from tests.drafters import eagle2
from tests.glide_models import untrained_glide

POLICIES = [
    FixedPolicy(length=4),
    HeuristicPolicy(initial=3),
    SVIPPolicy(threshold=0.6, max_length=8),
    ConfidencePolicy(threshold=0.3, max_length=8),
]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
PROMPTS = [[5, 9, 3], [7], [11, 2, 30, 41, 8, 8, 19, 17, 4], list(range(3, 40)), [60, 50, 40]]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny.llama()


@pytest.fixture(scope="module")
def drafter(target: PreTrainedModel) -> PreTrainedModel:
    return tiny.noisy(target, 0.15)


def cape(model: PreTrainedModel, **parameters: object) -> dict:
    return {"name": "cape", "base": {"name": "autoregressive", "model": model}, **parameters}


class TestTree:
    def test_widens_by_confidence(self) -> None:
        """Two rows; the second one drafted one token fewer."""
        chain = DraftTree.chain(
            torch.tensor([[4, 7, 1], [2, 3, 0]]),
            torch.tensor([[True, True, True], [True, True, False]]),
        )
        best = torch.tensor([[[4, 8, 9], [7, 5, 6], [1, 2, 3]], [[9, 2, 8], [5, 6, 7], [0, 1, 2]]])
        wanted = torch.tensor([[3, 1, 2], [2, 3, 3]])
        tree = widen(chain, best, wanted)
        assert nodes(tree, 0) == [(4, -1), (7, 0), (1, 1), (8, -1), (9, -1), (2, 1)]
        # The chain's token was not the most probable one: the best others stand beside it.
        assert nodes(tree, 1) == [(2, -1), (3, 0), (9, -1), (5, 0), (6, 0)]
        assert tree.depth == 3
        assert not tree.is_chain
        assert tree.sampled is None

    def test_marks_what_was_sampled(self) -> None:
        tokens = torch.tensor([[2, 1]])
        proposals = torch.full((1, 2, 4), 0.25)
        chain = DraftTree.chain(tokens, torch.ones(1, 2).bool(), proposals)
        tree = widen(chain, torch.tensor([[[0, 1], [1, 3]]]), torch.tensor([[2, 2]]))
        assert nodes(tree, 0) == [(2, -1), (1, 0), (0, -1), (3, 0)]
        assert tree.sampled.tolist() == [[True, True, False, False]]
        assert tree.proposal[0, :2].tolist() == [0, 1]
        assert tree.max_sampled == 1

    def test_stays_a_chain_with_one_candidate(self, target, drafter) -> None:
        decoder = SpeculativeDecoder(target, cape(drafter, thresholds=[], candidates=[1]))
        output = decoder.generate([PROMPTS[0]], max_new_tokens=20, keep_trees=True)
        plain = SpeculativeDecoder(target, {"name": "autoregressive", "model": drafter})
        expected = plain.generate([PROMPTS[0]], max_new_tokens=20, keep_trees=True)
        assert [record.tree for record in output.rounds] == [
            record.tree for record in expected.rounds
        ]

    def test_counts_follow_the_table(self, target, drafter) -> None:
        """The published table, `8 8 8 6 6 6 4 4 2 2 2 2` by int(10 p)."""
        made = CapeDrafter(base={"name": "autoregressive", "model": drafter})
        probabilities = torch.tensor([[0.05, 0.29, 0.3, 0.59, 0.61, 0.79, 0.8, 0.95, 1.0]])
        table = [8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2, 2]
        expected = [table[int(10 * p)] for p in probabilities[0].tolist()]
        assert made._wanted(probabilities)[0].tolist() == expected


def nodes(tree: DraftTree, row: int) -> list[tuple[int, int]]:
    """`(token, parent)` of a row's real nodes."""
    real = tree.valid[row]
    return list(zip(tree.tokens[row][real].tolist(), tree.parents[row][real].tolist(), strict=True))


class TestGreedy:
    @policies
    def test_writes_what_the_target_writes(self, target, drafter, policy) -> None:
        expected = SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=40).token_ids
        chain = SpeculativeDecoder(target, {"name": "autoregressive", "model": drafter}, policy)
        tree = SpeculativeDecoder(target, cape(drafter), policy)
        alone = chain.generate(PROMPTS, max_new_tokens=40)
        wide = tree.generate(PROMPTS, max_new_tokens=40)
        assert alone.token_ids == wide.token_ids == expected
        assert wide.statistics.rounds < alone.statistics.rounds
        single = [tree.generate([prompt], max_new_tokens=40) for prompt in PROMPTS[:2]]
        assert [output.token_ids[0] for output in single] == expected[:2]

    def test_widens_an_eagle_chain(self, target) -> None:
        decoder = SpeculativeDecoder(target, CapeDrafter(base=eagle2(target, chain=True)))
        output = decoder.generate(PROMPTS, max_new_tokens=40)
        expected = SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=40)
        assert output.token_ids == expected.token_ids
        assert output.statistics.accepted > 0

    def test_with_processors_and_a_reduced_vocabulary(self, target, drafter) -> None:
        """The chain's token is then not the raw top token; candidates come from the list alone."""
        listed = list(range(0, 64, 2))
        section = cape(drafter)
        section["base"]["draft_vocab"] = listed
        settings = {"max_new_tokens": 40, "repetition_penalty": 1.5, "suppress_tokens": [4, 6, 8]}
        expected = SpeculativeDecoder(target).generate(PROMPTS, **settings).token_ids
        output = SpeculativeDecoder(target, section).generate(PROMPTS, keep_trees=True, **settings)
        assert output.token_ids == expected
        drafted = {
            token
            for record in output.rounds
            for tokens, valid in zip(record.tree["tokens"], record.tree["valid"], strict=True)
            for token, real in zip(tokens, valid, strict=True)
            if real
        }
        assert drafted <= set(listed)

    def test_the_base_keeps_only_its_own_tokens(self, target, drafter) -> None:
        """A side candidate was never fed to the base: its cache must not count it as read."""
        output = SpeculativeDecoder(target, cape(drafter), FixedPolicy(length=4)).generate(
            [PROMPTS[0]], max_new_tokens=60, keep_trees=True
        )
        accepted = [record.tree["accepted"][0] for record in output.rounds]
        assert any(path and path[-1] >= 4 for path in accepted), "no side candidate was accepted"
        base = output.generation.drafter.base
        text = torch.tensor(output.generation.texts)
        length = base.cache.lengths[0]
        fresh = SlotCache(1)
        CachedModel(drafter).forward(text[:, :length], fresh, [0])
        fresh.lengths = [length]
        for layer in range(2):
            for kept, right in zip(
                base.cache.committed(layer), fresh.committed(layer), strict=True
            ):
                torch.testing.assert_close(kept, right, rtol=0, atol=1e-4)

    def test_generations_share_nothing(self, target, drafter) -> None:
        decoder = SpeculativeDecoder(target, cape(drafter))
        first = decoder.generate([PROMPTS[0]], max_new_tokens=20, keep_trees=True)
        decoder.generate(PROMPTS, max_new_tokens=20)
        again = decoder.generate([PROMPTS[0]], max_new_tokens=20, keep_trees=True)
        assert [record.tree for record in first.rounds] == [record.tree for record in again.rounds]
        assert not hasattr(decoder.drafter.base, "cache")


class TestParameters:
    def test_expand_is_a_shorthand(self, target, drafter) -> None:
        section = {"name": "autoregressive", "model": drafter, "expand": "cape"}
        decoder = SpeculativeDecoder(target, section)
        assert isinstance(decoder.drafter, CapeDrafter)
        assert isinstance(decoder.drafter.base, AutoregressiveDrafter)

    @pytest.mark.parametrize(
        "base", ["ngram", "none", {"name": "eagle2", "checkpoint": "anywhere"}]
    )
    def test_a_base_that_proposes_no_chain_is_refused(self, base) -> None:
        with pytest.raises(SpecdecError, match=r"drafter\.base: .* chain"):
            CapeDrafter(base=base)

    def test_faults_of_the_base_are_told(self) -> None:
        with pytest.raises(SpecdecError, match=r"drafter\.base\.draft_vocabs: unknown key"):
            CapeDrafter(base={"name": "autoregressive", "model": "x", "draft_vocabs": [1]})

    @pytest.mark.parametrize(
        ("table", "fault"),
        [
            ({"thresholds": [0.5]}, r"candidates: 1 thresholds part 2 levels"),
            ({"candidates": [4]}, r"candidates: 3 thresholds part 4 levels.*\[4\]"),
            ({"thresholds": [0.6, 0.3, 0.8]}, r"thresholds: thresholds must rise"),
            ({"candidates": [8, 6, 4, 0]}, r"candidates: .* at least 1"),
        ],
    )
    def test_a_table_that_does_not_add_up_is_refused(self, table, fault) -> None:
        with pytest.raises(SpecdecError, match=fault):
            CapeDrafter(base={"name": "autoregressive", "model": "x"}, **table)


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    return law.tiny_llama()


@pytest.fixture(scope="module")
def bases(small, tmp_path_factory) -> dict[str, dict]:
    folder = untrained_glide(tmp_path_factory.mktemp("glide"), small)
    return {
        "glide": {"name": "glide", "checkpoint": str(folder)},
        "autoregressive": {"name": "autoregressive", "model": tiny.noisy(small, 0.5)},
    }


class TestSampling:
    @policies
    @pytest.mark.parametrize("name", ["glide", "autoregressive"])
    def test_keeps_the_targets_distribution(self, small, bases, name, policy) -> None:
        drafter = CapeDrafter(base=bases[name], thresholds=[0.3, 0.5], candidates=[4, 3, 2])
        law.assert_lossless(SpeculativeDecoder(small, drafter, policy), calls=2)

    @pytest.mark.parametrize("sample", [False, True])
    def test_of_an_eagle_chain_too(self, small, sample) -> None:
        drafter = CapeDrafter(
            base=eagle2(small, chain=True, sample=sample), thresholds=[0.3], candidates=[3, 2]
        )
        law.assert_lossless(SpeculativeDecoder(small, drafter), calls=2)

    def test_would_notice_a_wrong_proposal(self, small, bases) -> None:
        """Trying the chain's token with a `q` that it was not drawn from is not lossless."""
        drafter = WrongProposal(base=bases["glide"], thresholds=[0.3], candidates=[3, 2])
        decoder = SpeculativeDecoder(small, drafter, FixedPolicy(length=4))
        assert not all(fit.passes for fit in law.check(decoder, calls=2).values())


class WrongProposal(CapeDrafter):
    def finish(self) -> DraftTree:
        tree = super().finish()
        tree.proposals = torch.full_like(tree.proposals, 1 / tree.proposals.shape[-1])
        return tree
