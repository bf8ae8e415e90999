"""GliDe: a small decoder that also reads the target's own keys and values.

Source: Du et al. 2024, "GliDe with a CaPE" (arXiv 2402.02082).
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from specdec import masks
from specdec.cache import SlotCache
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.checkpoint import check_tensors, read_json, read_weights
from specdec.drafters.vocab import DraftVocabulary, load_draft_vocab
from specdec.errors import SpecdecError
from specdec.host import send
from specdec.params import Params as ParamsBase
from specdec.params import validate
from specdec.plugins import resolve_model
from specdec.state import GenerationState
from specdec.target import Target


class GlideDrafter(ChainDrafter):
    """Draft with a small decoder that attends to the target's cache, and so knows what it computed.

    A round begins with one pass over the last round's root, what was committed behind it and the
    new root; then each drafted token takes a pass of its own. In all of them the cross-attention
    reads every position that the target has verified (the root is not among them yet), in place, in
    the target's own cache. Nothing else is masked: the prompt is read with its own later positions
    in sight, unless the model says `causal_text`. The model's own cache keeps what lies before the
    root: the root and what is accepted behind it are read again in the next round, with what the
    target has computed for them by then.

    Source: Du et al. 2024, "GliDe with a CaPE" (arXiv 2402.02082).
    """

    summary = "a small decoder that reads the target's KV cache"
    source = "arXiv 2402.02082"

    class Params(ParamsBase):
        checkpoint: Any = Field(
            description="a model in the official layout: a registered name, a hub id, a folder, or "
            "a loaded GlideModel"
        )
        draft_vocab: list[int] | str | Literal[False] | None = Field(
            None,
            description="token ids to draft from, or a JSON file with them; by default the "
            "checkpoint's draft_vocab.json where it has one, false for the whole vocabulary",
        )

    def attach(self, target: Target) -> None:
        checkpoint = self.params.checkpoint
        if isinstance(checkpoint, GlideModel):
            where = None
            self.model = checkpoint.eval()
            check_fits(self.model.config, target.model, "drafter.checkpoint")
        else:
            where = resolve_model(str(checkpoint), "drafter.checkpoint")
            self.model = GlideModel.from_pretrained(where, target.model)
        self.max_positions = self.model.config.max_position_embeddings
        ids = load_draft_vocab(self.params.draft_vocab, where)
        vocab_size = target.vocab_size
        self.vocabulary = DraftVocabulary(vocab_size, vocab_size, ids).to(self.model.device)
        self.logits: Callable[[Tensor], Tensor] = self.model.logits
        if ids is not None:
            self.logits = self.vocabulary.output(self.model.output, self.model.dtype)

    def start(self, state: GenerationState) -> None:
        self.cache = SlotCache(state.batch_size)

    def first(self, state: GenerationState) -> Tensor:
        self._look_at_target(state.cache)
        every = torch.arange(state.batch_size, device=self.model.device)
        begun = list(self.cache.lengths)
        hidden, ends = self.catch_up(
            state,
            begun,
            self.model.device,
            lambda tokens, starts, last: self._read(tokens, starts, text=True)[every, last],
        )
        self.cache.lengths = [max(start, end - 1) for start, end in zip(begun, ends, strict=True)]
        return self.logits(hidden)

    def following(self, tokens: Tensor, depth: int) -> Tensor:
        starts = [length + depth for length in self.cache.lengths]
        return self.logits(self._read(tokens[:, None], starts)[:, 0])

    def rewind(self, lengths: list[int]) -> None:
        self.cache.lengths = [min(pair) for pair in zip(self.cache.lengths, lengths, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)

    def _look_at_target(self, cache: SlotCache) -> None:
        """What the cross-attention reads in this round: views of the target's cache, and a mask."""
        self.target = [cache.committed(layer) for layer in self.model.target_layers]
        self.cross_mask = None
        if len(set(cache.lengths)) > 1:
            lengths = send(cache.lengths, self.model.device)
            slots = torch.arange(max(cache.lengths), device=self.model.device)
            self.cross_mask = slots < lengths[:, None, None]

    def _read(self, tokens: Tensor, starts: list[int], text: bool = False) -> Tensor:
        """`[B, T, H]` for `tokens [B, T]` at positions `starts[b]`, `starts[b] + 1`, ...

        Args:
            text: they are committed, not drafted.
        """
        device, count = tokens.device, tokens.shape[1]
        self.cache.place(starts, count)
        positions = send(starts, device)[:, None] + torch.arange(count, device=device)
        mask, cross_mask = masks.causal(starts, count, self.cache.used, device), self.cross_mask
        if text and self.model.config.causal_text:
            slots = torch.arange(self.target[0][0].shape[2], device=device)
            cross_mask = slots < positions[..., None]
        return self.model(tokens, positions, self.target, mask, cross_mask, self.cache)


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one target layer, `[B, H_kv, S, D]` each, the keys rotated."""


class GlideConfig(BaseModel):
    """`config.json` of a GliDe model, in the official form. Other keys are kept as they are.

    The `large_` keys are sizes of the target: its hidden size, its query heads and their size.
    Two keys are not in the official form. `large_layers`: which of the target's layers each layer
    reads, where these are not its last ones. `causal_text`: the text is read as in training, each
    token with what came before it in sight; only a model of several layers can tell the difference.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(None, gt=0)
    hidden_act: str = "silu"
    max_position_embeddings: int = Field(2048, gt=0)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    block_size: int = Field(5, gt=0)
    large_hidden_size: int = Field(gt=0)
    large_num_attention_heads: int = Field(gt=0)
    large_head_dim: int | None = Field(None, gt=0)
    large_layers: list[int] | None = None
    causal_text: bool = False

    @classmethod
    def for_target(cls, target: PreTrainedModel, **keys: Any) -> GlideConfig:
        """A new model for `target`: one layer of the target's sizes, where `keys` says nothing."""
        config = target.config.get_text_config(decoder=True)
        copied = (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        )  # fmt: skip
        sizes = {name: getattr(config, name) for name in copied if hasattr(config, name)}
        large = {f"large_{name}": size for name, size in _target_sizes(target).items()}
        return validate(cls, {"num_hidden_layers": 1} | sizes | large | keys, "GlideConfig")

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def target_head_dim(self) -> int:
        return self.large_head_dim or self.large_hidden_size // self.large_num_attention_heads

    def target_layers(self, depth: int) -> list[int]:
        """For each layer, which one it reads of the `depth` layers that the target has."""
        last = range(depth - self.num_hidden_layers, depth)
        return list(last) if self.large_layers is None else list(self.large_layers)

    def llama(self) -> LlamaConfig:
        """The sizes of this model itself, as transformers' classes read them."""
        keys = self.model_dump(include=set(GlideConfig.model_fields) - {"causal_text"})
        return LlamaConfig(**{name: keys[name] for name in keys if not name.startswith("large_")})

    def official(self) -> dict[str, Any]:
        """What `config.json` holds."""
        fixed = {"architectures": ["smallLlamaForCausalLM"], "model_type": "llama"}
        own = {"large_layers", "causal_text"}
        said = {name for name in own if getattr(self, name)}
        return fixed | self.model_dump(mode="json", exclude=own - said)


class GlideModel(nn.Module):
    """Llama layers with a cross-attention onto the target's keys and values in their middle.

    Layer i of n reads target layer N - n + i of N, or the one that the config names. The same forward
    serves training (whole sequences, no cache) and drafting (a cache). Parameters have the official
    names.

    Args:
        config: sizes.
        target: the model whose keys and values are read; it says how its queries are rotated.
        embedding, output: the target's input embedding and output layer, to be shared; None for own
            ones. What is shared is not trained, moved or saved with this model.
    """

    def __init__(
        self,
        config: GlideConfig,
        target: PreTrainedModel,
        embedding: nn.Module | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        self.target_layers = config.target_layers(depth)
        rotations = [Rotation.of_layer(target, layer) for layer in self.target_layers]
        self.model = GlideDecoder(config, rotations, own_embedding=embedding is None)
        size = config.hidden_size, config.vocab_size
        self.lm_head = nn.Linear(*size, bias=False) if output is None else None
        # In a tuple: torch must not take the target's layers for parts of this model.
        self._shared: tuple[Any, Any] = (embedding, output)

    @property
    def embedding(self) -> nn.Module:
        """The input embedding, an own one or the target's."""
        return self.model.embed_tokens or self._shared[0]

    @property
    def output(self) -> Any:
        """The output layer, an own one or the target's."""
        return self.lm_head or self._shared[1]

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        target: Sequence[KeysValues],
        self_mask: Tensor,
        cross_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """What the output layer reads, `[B, T, H]`; `logits` runs that layer.

        Args:
            ids: `[B, T]`.
            positions: `[B, T]`.
            target: for each layer, keys and values of target layer `target_layers[i]`; read in
                place, so views of larger buffers cost nothing.
            self_mask: `[B or 1, T, U]` True where a token reads one of this model's U keys.
            cross_mask: `[B or 1, T or 1, S]` True where a token reads one of the target's S keys;
                None means all. A token that reads none of them gets nothing from the target.
            cache: takes each layer's new keys and values and returns the U that are read; None
                when all of them come from this pass.
        """
        hidden = self.embedding(ids).to(self.model.norm.weight)
        return self.model(hidden, positions, target, self_mask, cross_mask, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., V]` raw logits for hidden states `[..., H]`."""
        weight = self.output.weight
        # A quantised layer's weight is of its own kind, or a method.
        plain = isinstance(weight, Tensor) and weight.is_floating_point()
        return self.output(hidden.to(weight) if plain else hidden)

    # --- checkpoints -----------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, checkpoint: str | Path, target: PreTrainedModel, dtype: torch.dtype | None = None
    ) -> GlideModel:
        """Load a checkpoint in the official layout, from a folder or a hub id.

        One without `model.embed_tokens` or `lm_head` takes them from the target.

        Args:
            dtype: None takes the target's.

        Raises:
            SpecdecError: files or tensors that are missing, unexpected or of another shape; sizes
                that do not fit the target.
        """
        keys = read_json(checkpoint)
        if "large_hidden_size" not in keys:
            raise SpecdecError(
                f"drafter checkpoint '{checkpoint}' is no GliDe model: its config.json has no "
                "large_hidden_size (the hidden size of the target it was trained for)."
            )
        config = validate(GlideConfig, keys, f"{checkpoint}/config.json")
        state = read_weights(checkpoint)
        if config.tie_word_embeddings and EMBEDDING in state:
            state.setdefault(OUTPUT, state[EMBEDDING])
        shares = [name for name in (EMBEDDING, OUTPUT) if name not in state]
        check_fits(config, target, f"drafter checkpoint '{checkpoint}'", shares)
        model = cls(
            config,
            target,
            embedding=target.get_input_embeddings() if EMBEDDING in shares else None,
            output=target.get_output_embeddings() if OUTPUT in shares else None,
        )
        check_tensors(state, model.state_dict(), checkpoint, "a GliDe model")
        model.load_state_dict(state)
        return model.to(target.get_output_embeddings().weight.device, dtype or target.dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` in the official layout."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}
        dtype = str(self.model.norm.weight.dtype).removeprefix("torch.")
        config = self.config.official() | {"torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class GlideDecoder(nn.Module):
    """All between the embedded tokens and the output layer; arguments as in `GlideModel`."""

    def __init__(
        self, config: GlideConfig, rotations: list[Rotation | None], own_embedding: bool
    ) -> None:
        super().__init__()
        size = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(*size) if own_embedding else None
        self.layers = nn.ModuleList(
            GlideLayer(config, index, rotation) for index, rotation in enumerate(rotations)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotation = Rotation(LlamaRotaryEmbedding(config.llama()))

    def forward(
        self, hidden: Tensor, positions: Tensor, target: Sequence[KeysValues],
        self_mask: Tensor, cross_mask: Tensor | None, cache: Cache | None,
    ) -> Tensor:  # fmt: skip
        rotate = self.rotation.at(positions, hidden)
        for layer, keys_values in zip(self.layers, target, strict=True):
            hidden = layer(hidden, positions, rotate, keys_values, self_mask, cross_mask, cache)
        return self.norm(hidden)


class GlideLayer(nn.Module):
    """Adds self-attention (of its normed input), cross-attention (not normed) and MLP (normed)."""

    def __init__(self, config: GlideConfig, index: int, rotation: Rotation | None) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, index)
        self.cross_attn = CrossAttention(config, rotation)
        self.mlp = LlamaMLP(config.llama())
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, positions: Tensor, rotate: Rotate, target: KeysValues,
        self_mask: Tensor, cross_mask: Tensor | None, cache: Cache | None,
    ) -> Tensor:  # fmt: skip
        """`[B, T, H]` -> `[B, T, H]`; the rest as in `GlideModel.forward`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotate, self_mask, cache)
        hidden = hidden + self.cross_attn(hidden, positions, target, cross_mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SelfAttention(nn.Module):
    """Attention over this model's own text."""

    def __init__(self, config: GlideConfig, index: int) -> None:
        super().__init__()
        size, key_size = config.hidden_size, config.key_value_heads * config.head_dim
        self.index = index
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, key_size, bias=False)
        self.v_proj = nn.Linear(size, key_size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, hidden: Tensor, rotate: Rotate, mask: Tensor, cache: Cache | None) -> Tensor:
        query, key, value = (
            _heads(projection(hidden), self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, key)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        return self.o_proj(attend(query, key, value, mask))


class CrossAttention(nn.Module):
    """Attention onto keys and values of one target layer, with queries rotated as the target's are.

    The official code rotates them with base 10,000 for every target; a query that is to meet the
    target's keys at the right distance needs the target's own base and scaling.
    """

    def __init__(self, config: GlideConfig, rotation: Rotation | None) -> None:
        super().__init__()
        size = config.large_num_attention_heads * config.target_head_dim
        self.head_dim = config.target_head_dim
        self.rotation = rotation
        self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, positions: Tensor, target: KeysValues, mask: Tensor | None
    ) -> Tensor:
        query = _heads(self.q_proj(hidden), self.head_dim)
        if self.rotation is not None:
            query, _ = self.rotation.at(positions, query)(query, query[:, :0])
        # The target's cache is read as it lies: type and device are the query's to change.
        key, value = target
        mask = None if mask is None else mask.to(key.device)
        return self.o_proj(attend(query.to(key), key, value, mask).to(hidden))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with grouped queries, `[B, T, heads * D]`.

    The queries that share a key head become rows of one head, so keys and values are neither
    repeated nor copied.

    Args:
        query: `[B, heads, T, D]`.
        key, value: `[B, H_kv, S, D]`.
        mask: `[B or 1, T or 1, S]` True where a query reads a key; None reads all.
    """
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], groups * length, -1)
    if mask is not None:
        mask = (mask if mask.shape[1] == 1 else mask.repeat(1, groups, 1))[:, None]
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.reshape(batch, heads, length, -1).transpose(1, 2).flatten(2)


def _heads(projected: Tensor, head_dim: int) -> Tensor:
    """`[B, T, heads * D]` -> `[B, heads, T, D]`."""
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class Rotation:
    """How one layer of a transformers model rotates its queries and keys.

    Runs that model's own code, so that every base, scaling, partial or interleaved rotation is what
    the model does. No `nn.Module`: frequencies stay float32 when a model changes its type.

    Args:
        rotary: the model's rotary embedding.
        layer_type: for models that rotate differently by type of layer.
    """

    def __init__(self, rotary: nn.Module, layer_type: str | None = None) -> None:
        # An own copy: some kinds of scaling change with the positions they meet.
        self._rotary = type(rotary)(rotary.config)
        self._apply = sys.modules[type(rotary).__module__].apply_rotary_pos_emb
        self._kind = () if layer_type is None else (layer_type,)

    @classmethod
    def of_layer(cls, model: PreTrainedModel, layer: int) -> Rotation | None:
        """The rotation in one layer of `model`; None where nothing is rotated.

        Raises:
            SpecdecError: a kind of rotation that cannot be run from outside the model.
        """
        config = model.config.get_text_config(decoder=True)
        rotates = getattr(config, "no_rope_layers", None)
        if rotates and not rotates[layer]:
            return None
        modules = model.get_decoder().modules()
        found = [module for module in modules if type(module).__name__.endswith("RotaryEmbedding")]
        if not found:
            return None
        rotary = found[0]
        apply = getattr(sys.modules[type(rotary).__module__], "apply_rotary_pos_emb", None)
        parameters = [] if apply is None else list(inspect.signature(apply).parameters)
        if parameters[:4] != ["q", "k", "cos", "sin"] or not hasattr(rotary, "config"):
            raise SpecdecError(
                f"glide: {type(model).__name__} rotates its queries in a way of its own "
                f"({type(rotary).__name__}), which GliDe cannot follow; use another drafter."
            )
        by_type = "layer_type" in inspect.signature(rotary.forward).parameters
        return cls(rotary, config.layer_types[layer] if by_type else None)

    def at(self, positions: Tensor, like: Tensor) -> Rotate:
        """What rotates queries and keys `[B, heads, T, D]` at `positions [B, T]`.

        Args:
            like: a tensor of the type and on the device of the queries.
        """
        if next(self._rotary.buffers()).device != like.device:
            self._rotary.to(like.device)
        cos, sin = self._rotary(like, positions, *self._kind)

        def rotate(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            size = cos.shape[-1]
            if size == query.shape[-1]:
                return self._apply(query, key, cos, sin)
            turned = self._apply(query[..., :size], key[..., :size], cos, sin)
            rest = query[..., size:], key[..., size:]
            query, key = (torch.cat(halves, -1) for halves in zip(turned, rest, strict=True))
            return query, key

        return rotate


Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """`[1, L, L]` self-attention in training: a token reads itself and what came before it."""
    return torch.ones(1, length, length, dtype=torch.bool, device=device).tril()


def block_mask(
    length: int, block_size: int, device: torch.device | None = None, offset: int = 0
) -> Tensor:
    """`[1, L, L]` cross-attention in training: a token reads the target's blocks before its own.

    So it sees keys and values that end 0 to `block_size - 1` tokens ago, as it will when it drafts.
    The first block has none before it and reads its causal prefix.

    Args:
        offset: place of the first token in its block.
    """
    blocks = (torch.arange(length, device=device) + offset) // block_size
    before = blocks[:, None] > blocks
    first = causal_mask(length, device) & (blocks[:, None] == 0)
    return before | first


def check_fits(
    config: GlideConfig, target: PreTrainedModel, where: str, shares: Sequence[str] = ()
) -> None:
    """Refuse a model made for another target.

    Args:
        shares: what the model takes from the target, for the message.

    Raises:
        SpecdecError: names every size that differs, the checkpoint's and the target's.
    """
    text = target.config.get_text_config(decoder=True)
    sizes = _target_sizes(target)
    pairs = {
        "hidden size": (config.large_hidden_size, sizes["hidden_size"]),
        "query heads": (config.large_num_attention_heads, sizes["num_attention_heads"]),
        "head size": (config.target_head_dim, sizes["head_dim"]),
        "vocabulary": (config.vocab_size, text.vocab_size),
    }
    faults = [
        f"{name} {ours} (the target has {theirs})"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    depth = text.num_hidden_layers
    layers = config.target_layers(depth)
    if any(not 0 <= layer < depth for layer in layers) or len(layers) != config.num_hidden_layers:
        faults.append(
            f"{config.num_hidden_layers} layers onto the target's layers {layers} (which has {depth})"
        )
    if shares and config.hidden_size != sizes["hidden_size"]:
        faults.append(
            f"no {' and no '.join(shares)} of its own, and hidden size {config.hidden_size}; "
            f"it cannot take the target's (hidden size {sizes['hidden_size']})"
        )
    if faults:
        raise SpecdecError(
            f"{where} does not fit this target ({type(target).__name__}): {'; '.join(faults)}."
        )


def _target_sizes(target: PreTrainedModel) -> dict[str, int]:
    config = target.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return {"hidden_size": hidden, "num_attention_heads": heads, "head_dim": head_dim}
