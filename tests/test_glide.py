"""The GliDe decoder, its checkpoints, and GliDe as a drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
)
from typer.testing import CliRunner

from specdec import SpecdecError, SpeculativeDecoder
from specdec.cache import SlotCache
from specdec.cli import make_app
from specdec.drafters.glide import (
    GlideConfig,
    GlideDrafter,
    GlideModel,
    Rotation,
    attend,
    block_mask,
    causal_mask,
)
from specdec.model import CachedModel
from specdec.policies import ConfidencePolicy, FixedPolicy, HeuristicPolicy, SVIPPolicy
from tests import law, tiny
from tests.glide_models import untrained_glide

POLICIES = [
    FixedPolicy(length=4),
    HeuristicPolicy(initial=3),
    SVIPPolicy(threshold=0.5, max_length=8),
    ConfidencePolicy(threshold=0.3, max_length=8),
]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
TRAINED = Path(__file__).parent / "golden" / "glide" / "gqa_2layers"
PROMPTS = [[5, 9, 3], [7], [11, 2, 30, 41, 8, 8, 19, 77, 4], list(range(3, 40)), [100, 90, 80, 70]]
"""Shorter and longer than a block of five."""


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny.llama()


@pytest.fixture(scope="module")
def folder(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_glide(tmp_path_factory.mktemp("glide"), target, num_hidden_layers=2)


@pytest.fixture(scope="module")
def trained() -> PreTrainedModel:
    """The target of a GliDe model that is often right (one of the golden ones)."""
    return AutoModelForCausalLM.from_pretrained(TRAINED / "target", dtype=torch.float32).eval()


SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"] * 2


class TestRotation:
    """The query must be rotated as the target rotates its own, whatever its base and scaling.

    A text of one repeated token has the same keys before rotation at every position, so the cached
    key at position 0, rotated to position p, must be the cached key at p.
    """

    @pytest.mark.parametrize(
        ("kind", "extra"),
        [
            ("llama", {"rope_theta": 10_000.0}),
            ("llama", {"rope_theta": 1_000_000.0}),
            ("llama", {"rope_parameters": LLAMA3}),
            ("qwen2", {}),
            ("qwen3", {}),
            ("mistral", {"sliding_window": 4}),
            ("gpt_neox", {"rotary_pct": 0.5}),
            ("gemma2", {"layer_types": TYPES}),
            ("gemma3_text", {"layer_types": TYPES}),
            ("phi3", {"partial_rotary_factor": 0.5}),
            ("phi", {"partial_rotary_factor": 0.5}),
            ("cohere", {}),
            ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
        ],
        ids=lambda value: value if isinstance(value, str) else ",".join(value) or "plain",
    )
    def test_is_the_targets_own(self, kind: str, extra: dict) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **(SIZES | extra))
        model = CachedModel(AutoModelForCausalLM.from_config(config).eval())
        cache, text = SlotCache(1), torch.full((1, 20), 7)
        model.forward(text, cache, [0])
        cache.lengths = [20]
        for layer in range(4):
            keys, _ = cache.committed(layer)
            start = keys[:, :, :1].expand_as(keys)
            rotation = Rotation.of_layer(model.model, layer)
            if rotation is None:
                assert (kind, layer) == ("smollm3", 2)
                torch.testing.assert_close(keys, start)
                continue
            turned, _ = rotation.at(torch.arange(20)[None], start)(start, start[:, :0])
            torch.testing.assert_close(turned, keys, rtol=0, atol=1e-5)
            assert not torch.allclose(start, keys, atol=1e-3)

    @pytest.mark.parametrize("kind", ["gpt2", "opt"])
    def test_is_none_where_positions_are_learned(self, kind: str) -> None:
        assert Rotation.of_layer(tiny.ARCHITECTURES[kind](), 0) is None

    def test_leaves_the_target_as_it_is(self) -> None:
        """Scaling that follows the length must not see the drafter's positions."""
        dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
        model = tiny.llama(max_position_embeddings=16, rope_parameters=dynamic)
        rotary = model.model.rotary_emb
        before = rotary.inv_freq.clone()
        query = torch.randn(1, 4, 1, 8)
        Rotation.of_layer(model, 0).at(torch.tensor([[400]]), query)(query, query)
        assert torch.equal(rotary.inv_freq, before)
        assert rotary.max_seq_len_cached == 16


class TestAttention:
    def test_groups_queries_like_repeated_keys(self) -> None:
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(2, 6, 3, 8),
            torch.randn(2, 2, 7, 8),
            torch.randn(2, 2, 7, 8),
        )
        mask = torch.rand(2, 3, 7) > 0.3
        repeated = (kind.repeat_interleave(3, dim=1) for kind in (key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, *repeated, attn_mask=mask[:, None]
        )
        found = attend(query, key, value, mask)
        torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2))

    def test_block_mask_by_hand(self) -> None:
        expected = [
            [1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 1, 0],
        ]
        assert block_mask(7, 3)[0].int().tolist() == expected
        assert torch.equal(block_mask(9, 3)[:, 2:, 2:], block_mask(7, 3, offset=2))

    def test_a_step_copies_nothing_of_the_targets_cache(self, target, folder) -> None:
        decoder = SpeculativeDecoder(target, {"name": "glide", "checkpoint": str(folder)})
        output = decoder.generate([list(range(2, 62)) * 4], max_new_tokens=8)
        drafter, cache = output.generation.drafter, output.generation.state.cache
        for layer, (keys, values) in zip(drafter.model.target_layers, drafter.target, strict=True):
            assert keys.data_ptr() == cache.layers[layer].keys.data_ptr()
            assert values.data_ptr() == cache.layers[layer].values.data_ptr()
        largest = LargestResult(ignore=drafter.cache)
        with largest, torch.no_grad():
            drafter.following(torch.tensor([3]), depth=1)
        assert 0 < largest.numel < drafter.target[0][0].numel()


class LargestResult(TorchDispatchMode):
    """The size of the largest tensor that any operation puts into fresh memory."""

    def __init__(self, ignore: object) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, tensor.numel())
        return result


def tensors(tree: object) -> Iterator[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


class TestCheckpoint:
    def test_comes_back_as_it_was_saved(self, target, folder, tmp_path) -> None:
        model = GlideModel.from_pretrained(folder, target)
        model.save_pretrained(tmp_path)
        again = GlideModel.from_pretrained(tmp_path, target)
        assert again.config.official() == model.config.official()
        saved = model.state_dict()
        assert saved.keys() == again.state_dict().keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in again.state_dict().items())

    def test_keeps_the_official_layout(self, target, folder) -> None:
        official = json.loads((TRAINED / "glide" / "config.json").read_text())
        written = json.loads((folder / "config.json").read_text())
        optional = {
            "initializer_range", "bos_token_id", "eos_token_id", "attention_bias", "pretraining_tp"
        }  # fmt: skip
        assert official.keys() - written.keys() <= optional
        names = GlideModel.from_pretrained(folder, target).state_dict().keys()
        trained = AutoModelForCausalLM.from_pretrained(TRAINED / "target")
        assert names == GlideModel.from_pretrained(TRAINED / "glide", trained).state_dict().keys()

    def test_without_vocabulary_shares_the_targets(self, target, tmp_path) -> None:
        untrained_glide(tmp_path, target, own_vocabulary=False)
        model = GlideModel.from_pretrained(tmp_path, target, dtype=torch.bfloat16)
        assert model.embedding is target.get_input_embeddings()
        assert model.output is target.get_output_embeddings()
        assert target.dtype == torch.float32
        assert not any("embed" in name or "head" in name for name in model.state_dict())
        shared = {id(tensor) for tensor in target.parameters()}
        assert shared.isdisjoint(id(tensor) for tensor in model.parameters())

    def test_for_another_target_names_both_sizes(self, folder) -> None:
        other = tiny.llama(vocab_size=80, hidden_size=48, num_attention_heads=6)
        with pytest.raises(SpecdecError) as error:
            GlideModel.from_pretrained(folder, other)
        message = str(error.value)
        for part in (str(folder), "hidden size 32", "48", "query heads 4", "6", "64", "80"):
            assert part in message

    def test_loaded_for_another_target_is_refused_too(self, target, folder) -> None:
        model = GlideModel.from_pretrained(folder, target)
        other = tiny.llama(num_attention_heads=8, num_key_value_heads=4)
        with pytest.raises(SpecdecError, match=r"query heads 4 \(the target has 8\)"):
            SpeculativeDecoder(other, GlideDrafter(checkpoint=model))

    def test_with_another_head_size_is_refused(self, folder) -> None:
        with pytest.raises(SpecdecError, match=r"head size 8 \(the target has 16\)"):
            GlideModel.from_pretrained(folder, tiny.llama(head_dim=16))

    def test_with_more_layers_than_the_target_is_refused(self, target, tmp_path) -> None:
        untrained_glide(tmp_path, tiny.llama(num_hidden_layers=3), num_hidden_layers=3)
        with pytest.raises(SpecdecError, match=r"3 layers.*which has 2"):
            GlideModel.from_pretrained(tmp_path, target)

    def test_that_cannot_share_is_refused(self, target, tmp_path) -> None:
        untrained_glide(tmp_path, target, own_vocabulary=False)
        rewrite(tmp_path, hidden_size=16)
        with pytest.raises(SpecdecError, match=r"lm_head\.weight of its own.*size 16.*size 32"):
            GlideModel.from_pretrained(tmp_path, target)

    def test_with_other_tensors_names_them(self, target, folder, tmp_path) -> None:
        model = GlideModel.from_pretrained(folder, target)
        state = model.state_dict()
        state["model.layers.0.extra"] = state.pop("model.layers.1.cross_attn.q_proj.weight")
        save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        with pytest.raises(SpecdecError) as error:
            GlideModel.from_pretrained(tmp_path, target)
        assert "missing model.layers.1.cross_attn.q_proj.weight" in str(error.value)
        assert "unexpected model.layers.0.extra" in str(error.value)

    def test_of_another_kind_is_refused(self, target, folder, tmp_path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 32, "vocab_size": 64}))
        with pytest.raises(SpecdecError, match=r"no GliDe model.*large_hidden_size"):
            GlideModel.from_pretrained(tmp_path, target)

    def test_that_is_nowhere_is_refused(self, target) -> None:
        with pytest.raises(SpecdecError, match="no folder"):
            SpeculativeDecoder(target, {"name": "glide", "checkpoint": "./nowhere"})


def rewrite(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


class TestTraining:
    def test_learns_through_the_block_mask(self, target) -> None:
        """A few steps on one text: gradients reach every weight of its own."""
        torch.manual_seed(0)
        config = GlideConfig.for_target(target, num_hidden_layers=2)
        shared = target.get_input_embeddings(), target.get_output_embeddings()
        model = GlideModel(config, target, *shared)
        ids = torch.randint(0, 64, (2, 24))
        with torch.no_grad():
            layers = target(ids, use_cache=True).past_key_values.layers
        keys_values = [(layers[at].keys, layers[at].values) for at in model.target_layers]
        positions = torch.arange(24).expand_as(ids)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(12):
            hidden = model(ids, positions, keys_values, causal_mask(24), block_mask(24, 5))
            logits = model.logits(hidden[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            assert all(tensor.grad.abs().sum() > 0 for tensor in model.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2


class TestGreedy:
    """The tokens must be those of transformers' greedy generate."""

    @policies
    @pytest.mark.parametrize("expand", [None, "cape"])
    def test_trained(self, trained, policy, expand) -> None:
        decoder = SpeculativeDecoder(trained, glide(TRAINED / "glide", expand), policy)
        expected = [tiny.plain(trained, prompt, 40) for prompt in PROMPTS]
        batch = decoder.generate(PROMPTS, max_new_tokens=40, eos_token_id=[])
        assert batch.token_ids == expected
        assert batch.statistics.accepted > 0
        single = [decoder.generate([p], max_new_tokens=40, eos_token_id=[]) for p in PROMPTS[:3]]
        assert [output.token_ids[0] for output in single] == expected[:3]
        for row, output in enumerate(single):
            # A row of a batch drafts what it would draft alone.
            assert output.row_statistics[0].accepted == batch.row_statistics[row].accepted

    @pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
    def test_untrained_on_every_target(self, kind, tmp_path) -> None:
        model = tiny.ARCHITECTURES[kind]()
        folder = untrained_glide(tmp_path, model, intermediate_size=32)
        decoder = SpeculativeDecoder(model, glide(folder, "cape"))
        prompts = tiny.ragged(3)
        output = decoder.generate(prompts, max_new_tokens=20, eos_token_id=[])
        assert output.token_ids == [tiny.plain(model, prompt, 20) for prompt in prompts]
        assert output.statistics.drafted > 0

    def test_prompts_longer_than_a_piece(self, trained, monkeypatch) -> None:
        """The first pass over a long prompt goes piece by piece; the draft must not notice."""
        decoder = SpeculativeDecoder(trained, glide(TRAINED / "glide"))
        torch.manual_seed(0)
        prompts = [torch.randint(3, 128, (length,)).tolist() for length in (33, 90, 150)]
        whole = decoder.generate(prompts, max_new_tokens=20, eos_token_id=[])
        monkeypatch.setattr("specdec.target.PREFILL_CHUNK", 32)
        pieces = decoder.generate(prompts, max_new_tokens=20, eos_token_id=[])
        assert whole.token_ids == [tiny.plain(trained, prompt, 20) for prompt in prompts]
        assert pieces.token_ids == whole.token_ids
        accepted = [[record.accepted for record in out.rounds] for out in (whole, pieces)]
        assert accepted[0] == accepted[1]

    def test_a_conversation_goes_on(self, trained) -> None:
        decoder = SpeculativeDecoder(trained, glide(TRAINED / "glide", "cape"))
        first = decoder.generate([PROMPTS[2]], max_new_tokens=15, eos_token_id=[])
        prompt = PROMPTS[2] + first.token_ids[0] + [6, 9, 20]
        second = decoder.generate([prompt], max_new_tokens=15, eos_token_id=[], continue_from=first)
        assert second.token_ids == [tiny.plain(trained, prompt, 15)]

    def test_stops_drafting_where_its_positions_end(self, trained, tmp_path) -> None:
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((TRAINED / "glide" / name).read_bytes())
        rewrite(tmp_path, max_position_embeddings=30)
        decoder = SpeculativeDecoder(trained, glide(tmp_path))
        with pytest.warns(UserWarning, match="context ends at 30"):
            output = decoder.generate([PROMPTS[2]], max_new_tokens=40, eos_token_id=[])
        assert output.token_ids == [tiny.plain(trained, PROMPTS[2], 40)]
        assert output.rounds[0].drafted[0] > 0
        assert output.rounds[-1].drafted == [0]

    def test_in_another_dtype_than_the_target(self, trained) -> None:
        half = GlideModel.from_pretrained(TRAINED / "glide", trained, dtype=torch.bfloat16)
        decoder = SpeculativeDecoder(trained, GlideDrafter(checkpoint=half))
        output = decoder.generate(PROMPTS, max_new_tokens=30, eos_token_id=[])
        assert output.token_ids == [tiny.plain(trained, prompt, 30) for prompt in PROMPTS]
        assert output.statistics.accepted > 0

    def test_reduced_vocabulary(self, trained) -> None:
        """Only the listed tokens are drafted, and only theirs are the logits computed."""
        prompt = PROMPTS[3]
        common = sorted(set(tiny.plain(trained, prompt, 40)[:25]))
        decoder = SpeculativeDecoder(trained, {**glide(TRAINED / "glide"), "draft_vocab": common})
        output = decoder.generate([prompt], max_new_tokens=40, eos_token_id=[], keep_trees=True)
        assert output.token_ids == [tiny.plain(trained, prompt, 40)]
        drafted = {token for record in output.rounds for token in record.tree["tokens"][0]}
        assert drafted <= set(common)
        assert output.statistics.accepted > 0
        assert output.generation.drafter.last_step.distributions.shape[-1] == len(common)


def glide(folder: Path, expand: str | None = None) -> dict[str, str]:
    section = {"name": "glide", "checkpoint": str(folder)}
    return section if expand is None else section | {"expand": expand}


@policies
def test_sampling_keeps_the_targets_distribution(policy, tmp_path) -> None:
    target = law.tiny_llama()
    decoder = SpeculativeDecoder(target, glide(untrained_glide(tmp_path, target)), policy)
    law.assert_lossless(decoder, calls=2)


@pytest.fixture(scope="module")
def smollm2_head(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model for SmolLM2, which shares its vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_path)
    return untrained_glide(tmp_path_factory.mktemp("head"), model, own_vocabulary=False)


@pytest.mark.parametrize("expand", [None, "cape"])
def test_the_command_line_runs_it_on_smollm2(smollm2_path, smollm2_head, expand) -> None:
    sections = {
        "target.model": smollm2_path, "target.dtype": "float32", "drafter.name": "glide",
        "drafter.checkpoint": smollm2_head, "policy.name": "svip",
        "generation.max_new_tokens": 8,
    }  # fmt: skip
    if expand is not None:
        sections["drafter.expand"] = expand
    chosen = [part for key, value in sections.items() for part in ("--set", f"{key}={value}")]
    done = CliRunner().invoke(
        make_app(), ["generate", "--prompt", "Name a fish.", "--json", *chosen]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["stats"]["drafted"] > 0
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name a fish."}], add_generation_prompt=True
    )
    prompt = chat["input_ids"] if hasattr(chat, "keys") else chat
    expected = tiny.plain(model, prompt, 8)
    assert result["results"][0]["token_ids"] == expected[: len(result["results"][0]["token_ids"])]
