"""The EAGLE head, its checkpoints, and EAGLE-2 as a drafter."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaModel,
    LogitsProcessorList,
    PreTrainedModel,
)

from specdec import SpecdecError, SpeculativeDecoder, masks
from specdec.cache import SlotCache
from specdec.draft import DraftStep, DraftTree
from specdec.drafters.eagle2 import Eagle2Drafter, EagleConfig, EagleHead, Pool
from specdec.drafters.vocab import DraftVocabulary, load_draft_vocab
from specdec.policies import (
    ConfidencePolicy,
    FixedPolicy,
    HeuristicPolicy,
    LengthPolicy,
    SVIPPolicy,
)
from specdec.sampling import Sampler
from specdec.state import GenerationState
from specdec.target import Target, TargetPass
from tests import law, tiny

TRAINED = Path(__file__).parent / "golden" / "eagle2_official" / "gqa_nobias"
"""A target, and a head whose drafts are right about half of the time."""
POLICIES: list[LengthPolicy] = [
    FixedPolicy(length=5),
    HeuristicPolicy(initial=2),
    SVIPPolicy(threshold=0.5),
    ConfidencePolicy(threshold=0.3),
]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TRAINED / "target", dtype=torch.float32).eval()


def trained(**parameters: Any) -> Eagle2Drafter:
    sizes = {"top_k": 4, "depth": 4, "total_tokens": 20}
    return Eagle2Drafter(checkpoint=str(TRAINED / "head"), **(sizes | parameters))


def new_head(seed: int = 0, own_embedding: bool = False, **keys: Any) -> EagleHead:
    torch.manual_seed(seed)
    return EagleHead(EagleConfig(**(SIZES | keys)), own_embedding).eval()


def prompts(vocab_size: int = 128) -> list[list[int]]:
    return tiny.ragged(5, vocab_size)


class TestHead:
    @pytest.mark.parametrize(
        "keys",
        [
            {},
            {"num_key_value_heads": 2, "bias": False, "rope_theta": 500_000.0},
            {"qkv_bias": True, "rms_norm_eps": 1e-3},
            {"num_hidden_layers": 2, "num_key_value_heads": 1},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 777.0},
        ],
        ids=lambda keys: ",".join(keys) or "defaults",
    )
    @torch.no_grad()
    def test_is_llama_layers_behind_the_joined_input(self, keys: dict[str, Any]) -> None:
        """transformers' own layers, with the first input norm and the last norm taken out."""
        head = new_head(**keys)
        weights = head.official_state_dict()
        embeds, features = torch.randn(2, 2, 9, 32)
        positions = torch.arange(5, 14)[None]
        found = head(embeds, features, positions)
        joined = torch.cat([embeds, features], -1) @ weights["fc.weight"].T
        if head.config.bias:
            joined = joined + weights["fc.bias"]
        else:
            assert "fc.bias" not in weights
        model = llama_layers(head.config, weights)
        expected = model(inputs_embeds=joined, position_ids=positions).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_takes_the_official_defaults(self) -> None:
        config = EagleConfig(**SIZES)
        assert (config.rope_theta, config.bias, config.qkv_bias) == (10_000.0, True, False)
        assert config.key_value_heads == 4

    def test_learns(self) -> None:
        """Gradients reach every weight through the training forward."""
        head = new_head(num_hidden_layers=2).train()
        out = head(torch.randn(1, 6, 32), torch.randn(1, 6, 32), torch.arange(6)[None])
        out.square().sum().backward()
        assert all(weight.grad is not None for weight in head.parameters())

    def test_other_rope_scaling_is_refused(self) -> None:
        with pytest.raises(SpecdecError, match="'llama3' is not supported"):
            new_head(rope_scaling={"rope_type": "llama3", "factor": 8.0})


def llama_layers(config: EagleConfig, weights: dict[str, Tensor]) -> LlamaModel:
    scaling = config.rope_scaling
    theta = 10_000.0 if scaling else config.rope_theta
    rope = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        rope |= {"rope_type": "linear", "factor": scaling["factor"]}
    llama = LlamaConfig(
        **SIZES, num_hidden_layers=config.num_hidden_layers, rms_norm_eps=config.rms_norm_eps,
        num_key_value_heads=config.key_value_heads, rope_parameters=rope,
        attention_bias=config.qkv_bias, pad_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaModel(llama).eval()
    model.layers[0].input_layernorm = nn.Identity()
    model.norm = nn.Identity()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert all(name.startswith("fc.") for name in unexpected)
    # Llama's output projection has a bias where q, k and v have one; the head's has none.
    assert set(missing) <= {"embed_tokens.weight", "layers.0.self_attn.o_proj.bias"}
    if config.qkv_bias:
        model.layers[0].self_attn.o_proj.bias.zero_()
    return model


class TestCheckpoint:
    def test_saving_keeps_the_official_layout(self, tmp_path: Path) -> None:
        head = EagleHead.from_pretrained(TRAINED / "head")
        head.save_pretrained(tmp_path)
        official, saved = (
            load_file(folder / "model.safetensors") for folder in (TRAINED / "head", tmp_path)
        )
        assert official.keys() == saved.keys()
        assert all(torch.equal(official[name], saved[name]) for name in official)
        before, after = (
            json.loads((folder / "config.json").read_text())
            for folder in (TRAINED / "head", tmp_path)
        )
        assert before.items() <= after.items()
        assert after["bias"] is False

    def test_pytorch_bin_loads(self, tmp_path: Path) -> None:
        head = new_head(own_embedding=True, qkv_bias=True)
        write(tmp_path, head, pickled=True)
        again = EagleHead.from_pretrained(tmp_path)
        assert again.embed_tokens is not None
        for name, tensor in head.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)

    def test_a_pickle_runs_no_code(self, tmp_path: Path) -> None:
        write(tmp_path, new_head(), pickled=True)
        touched = tmp_path / "touched"
        (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(touched), protocol=2))
        with pytest.raises(SpecdecError, match=r"pytorch_model\.bin cannot be read as weights"):
            EagleHead.from_pretrained(tmp_path)
        assert not touched.exists()

    def test_a_rotary_buffer_of_old_releases_is_ignored(self, tmp_path: Path) -> None:
        old = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
        write(tmp_path, new_head(), extra=old)
        EagleHead.from_pretrained(tmp_path)

    @pytest.mark.parametrize("name", ["d2t", "midlayer.self_attn.q_proj.weight"])
    def test_eagle3_is_refused_by_name(self, tmp_path: Path, name: str) -> None:
        write(tmp_path, new_head(), extra={name: torch.zeros(4)})
        with pytest.raises(SpecdecError, match=f"is an EAGLE-3 head.*{name}.*EAGLE-2 head"):
            EagleHead.from_pretrained(tmp_path)

    def test_eagle3_is_known_by_its_three_features(self, tmp_path: Path) -> None:
        write(tmp_path, new_head(), extra={"fc.weight": torch.zeros(32, 96)})
        with pytest.raises(SpecdecError, match=r"EAGLE-3 head .*96 = 3 x 32"):
            EagleHead.from_pretrained(tmp_path)

    def test_wrong_tensors_are_all_named(self, tmp_path: Path) -> None:
        extra = {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(31)}
        write(tmp_path, new_head(), extra=extra, drop=["layers.0.self_attn.o_proj.weight"])
        with pytest.raises(SpecdecError) as error:
            EagleHead.from_pretrained(tmp_path)
        for words in (
            "missing layers.0.self_attn.o_proj.weight",
            "unexpected layers.1.mlp.up_proj.weight",
            "fc.bias is [31], config.json says [32]",
        ):
            assert words in str(error.value)

    def test_a_wrong_configuration_is_explained(self, tmp_path: Path) -> None:
        write(tmp_path, new_head())
        config = json.loads((tmp_path / "config.json").read_text())
        del config["hidden_size"]
        (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
        with pytest.raises(SpecdecError) as error:
            EagleHead.from_pretrained(tmp_path)
        assert "hidden_size: missing" in str(error.value)
        assert "hidden_act" in str(error.value)

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(SpecdecError, match=r"has no config\.json"):
            EagleHead.from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(SIZES))
        with pytest.raises(
            SpecdecError, match=r"has no model\.safetensors and no pytorch_model\.bin"
        ):
            EagleHead.from_pretrained(tmp_path)

    def test_another_hidden_size_is_refused_with_both(self, target: PreTrainedModel) -> None:
        head = new_head(hidden_size=48, vocab_size=128)
        with pytest.raises(SpecdecError, match="hidden size 48, and this target has 32"):
            SpeculativeDecoder(target, Eagle2Drafter(checkpoint=head))

    def test_another_vocabulary_is_refused_with_both(self, target: PreTrainedModel) -> None:
        with pytest.raises(SpecdecError, match="64 tokens, and this target has 128"):
            SpeculativeDecoder(target, Eagle2Drafter(checkpoint=new_head()))

    @pytest.mark.parametrize("padded", [120, 136])
    def test_a_vocabulary_padded_otherwise_works(
        self, target: PreTrainedModel, padded: int
    ) -> None:
        head = new_head(vocab_size=padded, own_embedding=True)
        known = min(padded, 128)
        decoder = SpeculativeDecoder(Target(target, Words(known)), Eagle2Drafter(checkpoint=head))
        for prompt in ([5, 9, 3], [127, 126, 125]):
            found = decoder.generate([prompt], max_new_tokens=12, eos_token_id=[])
            assert found.token_ids[0] == tiny.plain(target, prompt, 12)


class Touch:
    """Unpickles by making a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Words:
    """A tokenizer of which only the size matters."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch_decode(self, rows: list[list[int]], **options: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def write(
    folder: Path, head: EagleHead, extra: dict[str, Tensor] | None = None,
    drop: list[str] | None = None, pickled: bool = False,
) -> None:  # fmt: skip
    """A checkpoint with some tensors more, less or other than `head` has."""
    head.save_pretrained(folder)
    weights = head.official_state_dict() | (extra or {})
    weights = {name: tensor for name, tensor in weights.items() if name not in (drop or [])}
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(
            {name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors"
        )


class TestGreedy:
    @policies
    @pytest.mark.parametrize(
        "parameters",
        [{}, {"chain": True}, {"sample": True}, {"draft_vocab": list(range(0, 128, 2))}],
        ids=lambda parameters: ",".join(parameters) or "tree",
    )
    def test_equals_transformers(
        self, target: PreTrainedModel, policy: LengthPolicy, parameters: dict[str, Any]
    ) -> None:
        """One row alone, and five of different lengths that accept differently."""
        decoder = SpeculativeDecoder(target, trained(**parameters), policy)
        expected = [tiny.plain(target, prompt, 40) for prompt in prompts()]
        together = decoder.generate(prompts(), max_new_tokens=40, eos_token_id=[])
        assert together.token_ids == expected
        alone = decoder.generate([prompts()[3]], max_new_tokens=40, eos_token_id=[])
        assert alone.token_ids == expected[3:4]
        assert alone.statistics.accepted > 0

    def test_rows_draft_what_they_draft_alone(self, target: PreTrainedModel) -> None:
        decoder = SpeculativeDecoder(target, trained(), FixedPolicy(length=5))
        together = decoder.generate(prompts(), max_new_tokens=40, eos_token_id=[])
        for place, prompt in enumerate(prompts()):
            alone = decoder.generate([prompt], max_new_tokens=40, eos_token_id=[])
            assert together.row_statistics[place].accepted == alone.statistics.accepted
            assert together.row_statistics[place].drafted == alone.statistics.drafted


class Checked(Eagle2Drafter):
    """Compares its cache with a fresh pass over the committed text, in every round."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.checked: list[int] = []

    def attach(self, target: Target) -> None:
        super().attach(target)
        self.model = target.model

    def begin(self, state: GenerationState) -> None:
        super().begin(state)
        for row, length in enumerate(state.lengths):
            text = state.ids[row : row + 1, :length]
            fresh = SlotCache(1)
            fresh.place([0], length - 1)
            mask = masks.additive(
                masks.causal([0], length - 1, length - 1, text.device), torch.float32
            )
            features = self.model.model(text[:, :-1]).last_hidden_state
            positions = torch.arange(length - 1)[None]
            out = self.head(self.embed(text[:, 1:]), features, positions, mask, fresh)
            fresh.lengths = [length - 1]
            assert self.cache.lengths[row] == length - 1
            near = {"rtol": 0, "atol": 1e-5}
            torch.testing.assert_close(self.seed[row], out[0, -1], **near)
            for mine, theirs in zip(self.cache.committed(0), fresh.committed(0), strict=True):
                torch.testing.assert_close(mine[row, :, : length - 1], theirs[0], **near)
            self.checked.append(length)


class TestCache:
    """Only committed tokens stay in the head's cache, with the target's true features."""

    def test_holds_what_a_fresh_pass_computes(self, target: PreTrainedModel) -> None:
        drafter = Checked(**trained().params.model_dump())
        decoder = SpeculativeDecoder(target, drafter, FixedPolicy(length=5))
        output = decoder.generate(prompts(), max_new_tokens=30, eos_token_id=[])
        assert output.statistics.accepted > 20
        assert len(set(drafter.checked)) > 30

    def test_also_over_a_prompt_in_pieces(
        self, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdec.target.PREFILL_CHUNK", 4)
        drafter = Checked(**trained().params.model_dump())
        decoder = SpeculativeDecoder(target, drafter, FixedPolicy(length=5))
        output = decoder.generate(prompts(), max_new_tokens=8, eos_token_id=[])
        assert output.token_ids == [tiny.plain(target, prompt, 8) for prompt in prompts()]

    def test_also_when_a_conversation_goes_on_or_back(self, target: PreTrainedModel) -> None:
        drafter = Checked(**trained().params.model_dump())
        decoder = SpeculativeDecoder(target, drafter, FixedPolicy(length=5))
        first = prompts()[3]
        before = decoder.generate([first], max_new_tokens=20, eos_token_id=[])
        told = first + before.token_ids[0]
        for text in ([*told, 3, 4], [*told[:-6], 7, 7], [*told[:3], 9]):
            after = decoder.generate(
                [text], max_new_tokens=12, eos_token_id=[], continue_from=before
            )
            assert after.token_ids[0] == tiny.plain(target, text, 12)
            before = after


class Recorded(Eagle2Drafter):
    """Keeps every round's tree and pool, and how many tokens each pass of the head read."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.trees: list[DraftTree] = []
        self.pools: list[Pool] = []
        self.passes: list[list[int]] = []

    def attach(self, target: Target) -> None:
        super().attach(target)
        self.head.register_forward_pre_hook(
            lambda _, inputs: self.passes[-1].append(inputs[0].shape[1]) if self.passes else None
        )

    def begin(self, state: GenerationState) -> None:
        self.passes.append([])
        super().begin(state)

    def finish(self) -> DraftTree:
        self.trees.append(super().finish())
        self.pools.append(self.pool)
        return self.trees[-1]


def recorded(**parameters: Any) -> Recorded:
    return Recorded(**(trained().params.model_dump() | parameters))


class SomeBranches(LengthPolicy):
    """Lets each branch go on by chance."""

    def start(self, batch_size: int) -> None:
        self.draw = torch.Generator().manual_seed(5)
        self.asked: list[tuple[DraftStep, Tensor]] = []

    def keep_drafting(self, step: DraftStep) -> Tensor:
        self.asked.append((step, torch.rand(step.tokens.shape, generator=self.draw) < 0.4))
        return self.asked[-1][1]


class TestTree:
    @pytest.mark.parametrize("sharpness", [1.0, 40.0, 400.0])
    @pytest.mark.parametrize("total_tokens", [6, 20, 60])
    def test_is_the_best_of_the_pool_and_ties_keep_parents(
        self, target: PreTrainedModel, sharpness: float, total_tokens: int
    ) -> None:
        """With a sharp output layer many log-probabilities are exactly 0."""
        sharp = copy.deepcopy(target)
        sharp.lm_head.weight.data *= sharpness
        drafter = recorded(total_tokens=total_tokens)
        SpeculativeDecoder(sharp, drafter, FixedPolicy(length=5)).generate(
            prompts()[1:], max_new_tokens=16, eos_token_id=[]
        )
        ties = 0
        for tree, pool in zip(drafter.trees, drafter.pools, strict=True):
            tokens, scores, parents = (
                torch.cat(parts, 1) for parts in zip(*pool.levels, strict=True)
            )
            for row in range(len(tokens)):
                given = scores[row].tolist()
                best = sorted(range(len(given)), key=lambda i: (-given[i], i))
                best = sorted(best[: total_tokens - 1])
                ties += len(given) - len(set(given))
                # Nodes of the pool that were never there score -inf.
                best = [i for i in best if given[i] > -torch.inf]
                place = {pool_index: i for i, pool_index in enumerate(best)} | {-1: -1}
                there = tree.valid[row]
                assert tree.tokens[row, there].tolist() == tokens[row, best].tolist()
                assert [place[int(parents[row, i])] for i in best] == [
                    compact(there, int(parent)) for parent in tree.parents[row, there]
                ]
        assert ties > 0 or sharpness == 1.0

    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_a_short_draft_is_a_small_tree(self, target: PreTrainedModel, length: int) -> None:
        drafter = recorded(total_tokens=60)
        decoder = SpeculativeDecoder(target, drafter, FixedPolicy(length=length))
        decoder.generate([prompts()[1]], max_new_tokens=30, eos_token_id=[])
        whole = 4 + 16 * (length - 1)
        for tree, passes in zip(drafter.trees[:-2], drafter.passes, strict=False):
            assert tree.size == whole
            assert tree.valid.all()
            assert tree.depth == length
            assert passes[1:] == [4] * (length - 1)

    def test_only_branches_that_go_on_are_run(self, target: PreTrainedModel) -> None:
        drafter, policy = recorded(total_tokens=60), SomeBranches()
        decoder = SpeculativeDecoder(target, drafter, policy)
        output = decoder.generate([prompts()[1]], max_new_tokens=40, eos_token_id=[])
        assert output.token_ids[0] == tiny.plain(target, prompts()[1], 40)
        asked = iter(output.generation.policy.asked)
        for tree, passes in zip(drafter.trees[:-5], drafter.passes, strict=False):
            run, extended = [], set()
            for _ in range(5):
                step, answer = next(asked)
                going = int(answer.sum())
                if not going or step.depth == 5:
                    break
                run.append(going)
                extended |= {(step.depth, token) for token in step.tokens[0, answer[0]].tolist()}
            assert passes[1:] == run
            assert tree.size == 4 + 4 * sum(run)
            parents = set(tree.parents[0].tolist()) - {-1}
            depths = tree.depths[0, 1:].tolist()
            assert {(depths[i], int(tree.tokens[0, i])) for i in parents} <= extended

    def test_branches_stop_row_by_row(self, target: PreTrainedModel) -> None:
        decoder = SpeculativeDecoder(target, trained(), SomeBranches())
        output = decoder.generate(prompts(), max_new_tokens=30, eos_token_id=[])
        assert output.token_ids == [tiny.plain(target, prompt, 30) for prompt in prompts()]

    def test_a_chain_is_a_chain(self, target: PreTrainedModel) -> None:
        drafter = recorded(chain=True, depth=9, total_tokens=7)
        decoder = SpeculativeDecoder(target, drafter, FixedPolicy(length=20))
        decoder.generate([prompts()[1]], max_new_tokens=40, eos_token_id=[])
        assert all(tree.is_chain for tree in drafter.trees)
        assert max(tree.size for tree in drafter.trees) == 6

    @pytest.mark.parametrize("everywhere", [True, False])
    def test_overflowing_logits_are_not_drafted(
        self, target: PreTrainedModel, everywhere: bool
    ) -> None:
        """As a float16 head's may; other branches take the places."""
        drafter = recorded(total_tokens=12)
        decoder = SpeculativeDecoder(target, drafter, FixedPolicy(length=5))

        def output(hidden: Tensor) -> Tensor:
            overflows = everywhere | (hidden[..., :1] > 0)
            return target.lm_head(hidden).masked_fill(overflows, torch.inf)

        decoder.drafter.output = output
        text = decoder.generate([prompts()[1]], max_new_tokens=30, eos_token_id=[])
        assert text.token_ids[0] == tiny.plain(target, prompts()[1], 30)
        assert (text.statistics.drafted == 0) is everywhere
        for tree, pool in zip(drafter.trees, drafter.pools, strict=True):
            there = sum(int((scores > -torch.inf).sum()) for _, scores, _ in pool.levels)
            assert int(tree.valid.sum()) == min(11, there)

    def test_drafting_reads_nothing_back(
        self, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No tensor becomes a number or a list between the beginning and the end of a draft."""
        drafter = trained()
        drafter.attach(Target(target))
        state = GenerationState(
            prompts(), SlotCache(5), Sampler(LogitsProcessorList(), False), [], torch.device("cpu")
        )
        state.limits = [9, 9, 0, 9, 9]
        drafter.start(state)
        features = torch.randn(5, 21, 32)
        with torch.no_grad():
            drafter.prefill(state, TargetPass(features, features, [0] * 5, list(state.lengths)))
            state.append([[1]] * 5)
            for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__"):
                monkeypatch.setattr(Tensor, name, forbidden(name))
            drafter.begin(state)
            answers: list[Any] = [True, [[True, False, True, False]] * 4 + [[False] * 4], True]
            for answer in answers:
                assert drafter.extend(answer)
            tree = drafter.finish()
            monkeypatch.undo()
        assert tree.valid.any(1).tolist() == [True, True, False, True, True]


def compact(there: Tensor, index: int) -> int:
    """The index among the valid nodes."""
    return index if index == -1 else int(there[: index + 1].sum()) - 1


def forbidden(name: str) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"Tensor.{name}: the host waits for the device")

    return call


class TestDraftVocabulary:
    def test_nothing_else_is_drafted(self, target: PreTrainedModel) -> None:
        ids = list(range(127, 0, -3))
        drafter = recorded(draft_vocab=ids)
        decoder = SpeculativeDecoder(target, drafter, SVIPPolicy(threshold=0.8))
        decoder.generate(prompts(), max_new_tokens=20, eos_token_id=[])
        drafted = {int(token) for tree in drafter.trees for token in tree.tokens[tree.valid]}
        assert drafted <= set(ids)
        assert len(drafted) > 20

    def test_the_whole_vocabulary_in_another_order_changes_nothing(
        self, target: PreTrainedModel
    ) -> None:
        order = torch.randperm(128, generator=torch.Generator().manual_seed(0)).tolist()
        drafters = [recorded(draft_vocab=False), recorded(draft_vocab=order)]
        for drafter in drafters:
            SpeculativeDecoder(target, drafter, FixedPolicy(length=5)).generate(
                prompts(), max_new_tokens=20, eos_token_id=[]
            )
        for one, other in zip(*(drafter.trees for drafter in drafters), strict=True):
            assert torch.equal(one.tokens[one.valid], other.tokens[other.valid])
            assert torch.equal(one.parents, other.parents)

    def test_comes_with_the_checkpoint_or_from_a_file(
        self, target: PreTrainedModel, tmp_path: Path
    ) -> None:
        EagleHead.from_pretrained(TRAINED / "head").save_pretrained(tmp_path)
        (tmp_path / "draft_vocab.json").write_text("[3, 5, 8]")
        (tmp_path / "other.json").write_text("[3, 5]")
        for given, size in ((None, 3), (False, 128), (str(tmp_path / "other.json"), 2), ([1], 1)):
            drafter = Eagle2Drafter(checkpoint=str(tmp_path), draft_vocab=given)
            drafter.attach(Target(target))
            assert drafter.vocabulary.size == size
            assert drafter.output(torch.zeros(1, 32)).shape == (1, size)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([3, 128], "ids must lie in 0 to 127.*found .128"),
            ([], "found none"),
            ([3, 3], "given twice"),
            ("nowhere.json", "no file 'nowhere.json'"),
        ],
    )
    def test_faults_are_explained(
        self, target: PreTrainedModel, given: list[int] | str, message: str
    ) -> None:
        with pytest.raises(SpecdecError, match=message):
            SpeculativeDecoder(target, trained(draft_vocab=given))

    @pytest.mark.parametrize("content", ['{"a": 1}', "[1.5]", "["])
    def test_a_file_must_hold_ids(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "ids.json").write_text(content)
        with pytest.raises(SpecdecError, match=r"ids\.json' (must hold|is not) "):
            load_draft_vocab(str(tmp_path / "ids.json"))

    def test_rows_of_a_layer_that_hides_its_weight(self) -> None:
        """As quantised layers do."""
        torch.manual_seed(0)
        layer = nn.Linear(300, 20)
        vocabulary = DraftVocabulary(20, 20, [7, 2, 19])
        hidden = torch.randn(2, 300)
        expected = vocabulary.output(layer, torch.float32)(hidden)
        torch.testing.assert_close(expected, layer(hidden)[:, [7, 2, 19]])
        found = vocabulary.output(Hidden(layer), torch.float32)(hidden)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Hidden(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.call = layer.forward

    def forward(self, hidden: Tensor) -> Tensor:
        return self.call(hidden)


class TestSampling:
    """The target's own law, by exact enumeration: six tokens, so branches repeat each other's."""

    SETTINGS = (
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.5},
        {"temperature": 0.8, "top_p": 0.8},
    )

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize("sample", [False, True], ids=["fixed", "drawn"])
    def test_is_lossless(self, sample: bool, settings: dict[str, float]) -> None:
        model = law.tiny_llama()
        drafter = small(model, sample=sample, top_k=3, depth=2, total_tokens=9)
        decoder = SpeculativeDecoder(model, drafter, FixedPolicy(length=3))
        law.assert_lossless(decoder, calls=1, **settings)
        seen = [tree for tree in drafter.trees if tree.depth > 1]
        assert any(repeats_a_token_in_another_branch(tree) for tree in seen)
        assert all((tree.sampled is not None) is sample for tree in seen)

    @pytest.mark.parametrize(
        "parameters", [{"chain": True}, {"draft_vocab": [1, 2, 4, 5]}], ids=str
    )
    def test_is_lossless_for_chains_and_reduced_vocabularies(
        self, parameters: dict[str, Any]
    ) -> None:
        model = law.tiny_llama()
        drafter = small(model, **({"sample": True, "top_k": 3, "total_tokens": 12} | parameters))
        decoder = SpeculativeDecoder(model, drafter, SVIPPolicy(threshold=0.45))
        law.assert_lossless(decoder, calls=1)

    @pytest.mark.parametrize("sample", [False, True], ids=["fixed", "drawn"])
    def test_is_lossless_where_branches_stop_row_by_row(self, sample: bool) -> None:
        """Rows are widest at different levels."""
        model = law.tiny_llama()
        drafter = small(model, sample=sample, top_k=3, depth=3, total_tokens=30)
        law.assert_lossless(SpeculativeDecoder(model, drafter, SomeBranches()), calls=1)

    def test_is_lossless_with_processors_that_read_the_prefix(self) -> None:
        model = law.tiny_llama()
        drafter = small(model, sample=True, top_k=3, total_tokens=12)
        decoder = SpeculativeDecoder(model, drafter, FixedPolicy(length=3))
        law.assert_lossless(decoder, calls=1, repetition_penalty=1.5)

    def test_dropping_drawn_tokens_by_their_score_is_caught(self) -> None:
        """What the official choice of the best nodes would do to drawn children."""
        model = law.tiny_llama()
        drafter = small(model, Greedy, sample=True, top_k=3, depth=1, total_tokens=12)
        decoder = SpeculativeDecoder(model, drafter, FixedPolicy(length=2))
        found = law.check(decoder, calls=1)
        assert not all(each.passes for each in found.values())

    def test_drawn_children_accept_more_at_a_high_temperature(
        self, target: PreTrainedModel
    ) -> None:
        accepted = []
        for sample in (False, True):
            decoder = SpeculativeDecoder(target, trained(sample=sample), FixedPolicy(length=3))
            output = decoder.generate(
                prompts() * 8, max_new_tokens=30, temperature=2.0, seed=0, eos_token_id=[]
            )
            accepted.append(output.statistics.alpha)
        assert accepted[1] > accepted[0]


class Greedy(Recorded):
    """Breaks the rule: of the drawn nodes only those with the best scores stay."""

    def finish(self) -> DraftTree:
        self.sizes = [4 for _ in self.sizes]
        return super().finish()


def small(model: PreTrainedModel, kind: type[Recorded] = Recorded, **parameters: Any) -> Recorded:
    """A random head for a target of `law`, with distributions that are neither flat nor sure."""
    head = new_head(
        seed=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=6
    )
    for weight in head.parameters():
        weight.data *= 3.0
    return kind(checkpoint=head, **parameters)


def repeats_a_token_in_another_branch(tree: DraftTree) -> bool:
    depths = tree.depths[:, 1:]
    alike = tree.tokens[:, :, None] == tree.tokens[:, None]
    alike &= depths[:, :, None] == depths[:, None]
    alike &= tree.parents[:, :, None] != tree.parents[:, None]
    return bool((alike & tree.valid[:, :, None] & tree.valid[:, None]).any())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    return Target(model, AutoTokenizer.from_pretrained(smollm2_path))


QUESTIONS = [
    "Count: one, two, three, four,",
    "The capital of France is",
    "a",
    "Once upon a time there was a fox. The fox was red. The fox was quick. The fox was",
    "def add(a, b):",
]


@pytest.fixture(scope="module")
def smollm2_texts(smollm2: Target) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers writes behind them."""
    ids = [smollm2.tokenizer(text)["input_ids"] for text in QUESTIONS]
    return [(prompt, tiny.plain(smollm2.model, prompt, 20)) for prompt in ids]


@pytest.mark.slow
@policies
def test_greedy_on_smollm2(
    smollm2: Target, smollm2_texts: list[tuple[list[int], list[int]]], policy: LengthPolicy
) -> None:
    drafter = Eagle2Drafter(checkpoint="smollm2-135m-eagle2", top_k=8, depth=3, total_tokens=16)
    decoder = SpeculativeDecoder(smollm2, drafter, policy)
    ids, expected = (list(part) for part in zip(*smollm2_texts, strict=True))
    together = decoder.generate(ids, max_new_tokens=20, eos_token_id=[])
    assert together.token_ids == expected
    assert together.statistics.accepted > 0
    alone = decoder.generate(ids[:1], max_new_tokens=20, eos_token_id=[])
    assert alone.token_ids == expected[:1]
