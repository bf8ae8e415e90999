"""EAGLE-2: a one-layer head that continues the target's own features, and the tree it drafts.

Source: Li et al. 2024, EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from specdec.drafters.checkpoint import check_tensors, read_json, read_weights
from specdec.errors import SpecdecError
from specdec.params import validate


class EagleConfig(BaseModel):
    """`config.json` of a head, in the official form. Keys not named here are kept as they are.

    The defaults are those of the official code: an absent `rope_theta` is 10,000 whatever the
    target has, an absent `bias` is true.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(None, gt=0)
    num_hidden_layers: int = Field(1, gt=0)
    vocab_size: int = Field(gt=0)
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu"] = "silu"
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    bias: bool = True
    qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def official(self) -> dict[str, Any]:
        """What `config.json` holds: the official code reads it as a Llama configuration."""
        fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return fixed | self.model_dump(mode="json")


class EagleHead(nn.Module):
    """From the feature at a position and the next token, the feature at the next position.

    A *feature* is what the target's output layer reads: its last hidden state, behind the final
    norm. The pair at position i is (feature of token i, embedding of token i + 1); the head's
    output there predicts the feature of token i + 1, and the target's own output layer turns it
    into the distribution of token i + 2. RoPE position of the pair: i.

    The same forward serves training (whole sequences, no cache) and drafting (a cache).

    Args:
        config: sizes; `EagleConfig(**json)`.
        own_embedding: the head keeps an embedding of its own (`embed_tokens`); otherwise whoever
            calls it embeds the tokens with the target's.
    """

    frequencies: Tensor

    def __init__(self, config: EagleConfig, own_embedding: bool = False) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embedding else None
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList(
            EagleLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.register_buffer("frequencies", _rope_frequencies(config), persistent=False)

    def forward(
        self, embeds: Tensor, features: Tensor, positions: Tensor,
        mask: Tensor | None = None, cache: Cache | None = None,
    ) -> Tensor:  # fmt: skip
        """Predict the next feature for each pair.

        Args:
            embeds: `[B, T, H]` embedding of token i + 1 of each pair.
            features: `[B, T, H]` feature of token i: the target's, or the head's own output while
                it drafts ahead.
            positions: `[B or 1, T]` the i of each pair.
            mask: `[B or 1, 1, T, S]`, added to the attention scores; S counts the keys that `cache`
                returns, T of them without one. None: causal over the T pairs, without a cache.
            cache: takes each layer's new keys and values, returns all that the pairs may attend to.

        Returns:
            `[B, T, H]` predicted features, to be read by the target's output layer.
        """
        hidden = self.fc(torch.cat([embeds, features], dim=-1))
        rotation = self._rotation(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, mask, cache)
        return hidden

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, `[B, T, 1, head_dim]`: rotated = x * cos + roll(x) * sin."""
        angles = positions[..., None, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)

    # --- checkpoints -----------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, checkpoint: str | Path, dtype: torch.dtype | None = None, device: Any = None
    ) -> EagleHead:
        """Load a head in the official layout, from a folder or a hub id.

        Raises:
            SpecdecError: files are missing, a tensor is missing, unexpected or of another shape, or
                the checkpoint is an EAGLE-3 head.
        """
        config = validate(EagleConfig, read_json(checkpoint), f"{checkpoint}/config.json")
        state = read_weights(checkpoint)
        _refuse_eagle3(state, config, checkpoint)
        head = cls(config, own_embedding="embed_tokens.weight" in state)
        check_tensors(state, head.official_state_dict(), checkpoint, "an EAGLE head")
        head.load_state_dict(_fuse(state))
        return head.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` in the official layout."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            name: tensor.contiguous().cpu() for name, tensor in self.official_state_dict().items()
        }
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        config = self.config.official() | {"torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    def official_state_dict(self) -> dict[str, Tensor]:
        """The weights under the official names."""
        heads = self.config.num_attention_heads, self.config.key_value_heads
        return _split(self.state_dict(), *(count * self.config.head_dim for count in heads))


class EagleLayer(nn.Module):
    """A Llama decoder layer; the first one of a head has no norm before its attention.

    Queries, keys and values come from one matrix product, and so do the two halves of the MLP: at
    the few tokens of a drafting step the calls cost more than the arithmetic.
    """

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.index = index
        self.dim = dim
        self.heads = config.num_attention_heads
        self.key_value_heads = config.key_value_heads
        rotated = self.heads + self.key_value_heads
        self.input_norm = None if index == 0 else RMSNorm(size, config.rms_norm_eps)
        self.qkv = nn.Linear(size, (rotated + self.key_value_heads) * dim, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * dim, size, bias=False)
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor],
        mask: Tensor | None, cache: Cache | None,
    ) -> Tensor:  # fmt: skip
        """`[B, T, H]` -> `[B, T, H]`; `rotation`, `mask` and `cache` as in `EagleHead`."""
        normed = hidden if self.input_norm is None else self.input_norm(hidden)
        hidden = hidden + self._attention(normed, rotation, mask, cache)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(functional.silu(gate) * up)

    def _attention(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor],
        mask: Tensor | None, cache: Cache | None,
    ) -> Tensor:  # fmt: skip
        cos, sin = rotation
        joined = self.qkv(hidden).unflatten(-1, (-1, self.dim))
        rotated, value = joined.split(
            [self.heads + self.key_value_heads, self.key_value_heads], dim=2
        )
        rotated = rotated * cos + rotated.roll(self.dim // 2, dims=-1) * sin
        query, key = rotated.split([self.heads, self.key_value_heads], dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None,
            enable_gqa=self.heads != self.key_value_heads,
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    """Root-mean-square norm as in Llama: computed in float32, cast back, then scaled."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden.dtype)


def _rope_frequencies(config: EagleConfig) -> Tensor:
    """`[head_dim / 2]` radians a position. With scaling the official head's base stays 10,000."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    if not config.rope_scaling:
        return config.rope_theta**-exponents
    kind = config.rope_scaling.get("type", config.rope_scaling.get("rope_type"))
    if kind != "linear":
        raise SpecdecError(
            f"config.json: rope_scaling of type {kind!r} is not supported in an EAGLE head; "
            "the official code knows null and 'linear'."
        )
    return 10_000.0**-exponents / float(config.rope_scaling["factor"])


# --- the official checkpoint layout --------------------------------------------------------------

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
_RENAMED = {
    "out": "self_attn.o_proj",
    "down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
    "input_norm": "input_layernorm",
}


def _split(state: dict[str, Tensor], query_rows: int, key_rows: int) -> dict[str, Tensor]:
    """From this module's names to the official ones."""
    official = {}
    for name, tensor in state.items():
        stem, module, kind = _parts(name)
        if module == "qkv":
            parts = tensor.split([query_rows, key_rows, key_rows])
        elif module == "gate_up":
            parts = tensor.chunk(2)
        else:
            official[f"{stem}{_RENAMED.get(module, module)}.{kind}"] = tensor
            continue
        for part, target in zip(parts, _FUSED[module], strict=True):
            official[f"{stem}{target}.{kind}"] = part
    return official


def _fuse(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """From the official names to this module's."""
    own = {old: new for new, old in _RENAMED.items()}
    joins = {old: new for new, olds in _FUSED.items() for old in olds}
    state: dict[str, Tensor] = {}
    for name, tensor in official.items():
        stem, module, kind = _parts(name)
        if module not in joins:
            state[f"{stem}{own.get(module, module)}.{kind}"] = tensor
            continue
        olds = _FUSED[joins[module]]
        if module == olds[0]:
            parts = [official[f"{stem}{old}.{kind}"] for old in olds]
            state[f"{stem}{joins[module]}.{kind}"] = torch.cat(parts)
    return state


def _parts(name: str) -> tuple[str, str, str]:
    """`layers.0.mlp.up_proj.weight` -> `layers.0.`, `mlp.up_proj`, `weight`."""
    body, kind = name.rsplit(".", 1)
    if not body.startswith("layers."):
        return "", body, kind
    _, index, module = body.split(".", 2)
    return f"layers.{index}.", module, kind


def _refuse_eagle3(state: dict[str, Tensor], config: EagleConfig, checkpoint: str | Path) -> None:
    signs = [name for name in state if name in ("d2t", "t2d") or name.startswith("midlayer.")]
    joined = state["fc.weight"].shape[-1] if "fc.weight" in state else 0
    if joined == 3 * config.hidden_size:
        signs.append(f"fc.weight over {joined} = 3 x {config.hidden_size} features")
    if signs:
        raise SpecdecError(
            f"'{checkpoint}' is an EAGLE-3 head ({', '.join(sorted(signs)[:3])}); "
            "eagle2 runs EAGLE-1 and EAGLE-2 heads. Use the EAGLE-2 head for this target."
        )
