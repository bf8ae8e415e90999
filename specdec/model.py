"""Any decoder-only transformers model on a slot cache: the target, and drafters that are models."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import masks
from specdec.cache import SlotCache
from specdec.errors import SpecdecError
from specdec.host import send
from specdec.packing import PackedWeights

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
ALIBI = {"bloom", "mpt"}
OWN_WAYS = {
    "gpt_neo": "masks its local layers by cache slot, not by position",
    "moshi": "ignores the sliding window that its configuration names",
    "xlm": "keeps its keys and values in a cache of its own kind",
}
"""Model types that a slot cache and a 4-D mask do not reach, and why. (`tests/test_architectures.py`
looks for others.)"""


@dataclass
class ModelPass:
    """What one forward pass computed: `logits [B, K, V]` and, if asked for, `features [B, T, H]`."""

    logits: Tensor
    features: Tensor | None


class CachedModel:
    """Runs a transformers causal LM on a `SlotCache`, over chains and trees, ragged rows included.

    Works without a patched model: a 4-D mask and position ids say all there is to say about a tree,
    and a pre-hook on the output embedding reads the features that go into it (and picks the
    positions whose logits are wanted), whatever the architecture does before and after.

    Raises:
        SpecdecError: the model cannot work this way (encoder-decoder, recurrent state, ...).
    """

    def __init__(self, model: PreTrainedModel, role: str = "target") -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.window = _check(model, self.config, role)
        self._cache_argument = _cache_argument(model)
        self.packed: PackedWeights | nullcontext[None] = nullcontext()

    @property
    def device(self) -> torch.device:
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding (padding of the vocabulary included)."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Longest text that the model's positions allow, in tokens.

        A LongRoPE model rotates all keys anew when the text outgrows its first context; what is in
        the cache would be of the old kind, so its texts end there.
        """
        parameters = getattr(self.config, "rope_parameters", None) or {}
        kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
        limits = [
            kind.get("original_max_position_embeddings")
            for kind in kinds
            if kind.get("rope_type") == "longrope"
        ]
        limits.append(getattr(self.config, "max_position_embeddings", None))
        return min((limit for limit in limits if limit is not None), default=None)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: SlotCache,
        starts: list[int],
        *,
        visible: Tensor | None = None,
        positions: Tensor | None = None,
        keep: Tensor | None = None,
        features: bool = False,
    ) -> ModelPass:
        """One pass over `tokens [B, T]`, written to slots `starts[b] + t` of row b.

        Args:
            visible: `[B or 1, T, T]` which of the pass's own tokens each one reads (itself
                included); None means all before it.
            positions: `[B, T]`; None means that slots are positions.
            keep: `[B, K]` positions in the pass whose logits are wanted; None means all.
            features: whether to return the output layer's input at all T positions.
        """
        inputs = self._inputs(tokens, cache, starts, visible, positions)
        request = _OutputRequest(keep, features)
        # Only for this pass: the output layer may be shared with another model, and is the user's.
        hook = self.model.get_output_embeddings().register_forward_pre_hook(request)
        try:
            with self.packed:
                logits = self.model(**inputs).logits
        finally:
            hook.remove()
        return ModelPass(logits, request.features)

    @torch.no_grad()
    def hidden(self, tokens: Tensor, cache: SlotCache, starts: list[int]) -> Tensor:
        """`[B, T, H]`: like `forward` on a chain, without the output layer."""
        inputs = self._inputs(tokens, cache, starts, None, None)
        return self.model.base_model(**inputs)[0]

    def _inputs(
        self,
        tokens: Tensor,
        cache: SlotCache,
        starts: list[int],
        visible: Tensor | None,
        positions: Tensor | None,
    ) -> dict[str, Any]:
        count = tokens.shape[1]
        cache.place(starts, count)
        if positions is None:
            first = send(starts, tokens.device)[:, None]
            positions = first + torch.arange(count, device=tokens.device)
        if visible is None:
            allowed = masks.causal(starts, count, cache.used, tokens.device)
        else:
            allowed = masks.behind_prefix(starts, visible, cache.used)
        if self.max_positions is not None:
            # Rows that are idle in this pass carry padding behind their end; learned position
            # tables have no entry there, and what it computes is never read.
            positions = positions.clamp_max(self.max_positions - 1)
        return {
            "input_ids": tokens,
            "attention_mask": self._mask(allowed, starts, positions, cache.used),
            "position_ids": positions,
            "use_cache": True,
            "return_dict": True,
            self._cache_argument: cache,
        }

    def _mask(
        self, allowed: Tensor, starts: list[int], positions: Tensor, used: int
    ) -> Tensor | dict[str, Tensor]:
        kinds = self.window.kinds
        made: dict[str, Tensor] = {}
        if "full_attention" in kinds:
            made["full_attention"] = masks.additive(allowed, self.dtype)
        if "sliding_attention" in kinds:
            keys = masks.slot_positions(starts, positions, used)
            near = masks.within_window(allowed, positions, keys, self.window.size)
            made["sliding_attention"] = masks.additive(near, self.dtype)
        return made if len(kinds) > 1 else next(iter(made.values()))


class _OutputRequest:
    """A pre-hook on the output layer: keeps what goes into it, and lets only some positions in."""

    def __init__(self, keep: Tensor | None, wants_features: bool) -> None:
        self.keep = keep
        self.wants_features = wants_features
        self.features: Tensor | None = None

    def __call__(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        hidden = inputs[0]
        if self.wants_features:
            self.features = hidden
        if self.keep is None:
            return None
        index = self.keep.to(hidden.device)[..., None].expand(-1, -1, hidden.shape[-1])
        return (hidden.gather(1, index), *inputs[1:])


@dataclass(frozen=True)
class Window:
    """Which kinds of attention layers a model has, and how far the sliding ones look back."""

    kinds: frozenset[str]
    size: int = 0


def _check(model: PreTrainedModel, config: Any, role: str) -> Window:
    """The model's attention layout, or an error that says why it cannot be used."""
    taken = inspect.signature(model.forward).parameters
    implementation = getattr(config, "_attn_implementation", "eager")
    faults = {
        "is an encoder-decoder model; specdec decodes decoder-only models": getattr(
            model.config, "is_encoder_decoder", False
        ),
        "keeps a recurrent state that cannot be rolled back after a rejected draft; use a model "
        "with attention layers only": getattr(model, "_is_stateful", False),
        "has no output embedding; load it as a causal LM": model.get_output_embeddings() is None,
        "uses ALiBi, whose biases follow cache slots and not positions; use a model with rotary or "
        "learned positions": getattr(config, "alibi", False) or config.model_type in ALIBI,
        "reads in both directions; load it with is_decoder=True": _reads_both_ways(model, config),
        "takes no position_ids, and the branches of a draft tree share slots of the text": (
            "position_ids" not in taken
        ),
        "takes no cache of keys and values": not {"cache", "past_key_values"} & set(taken),
        OWN_WAYS.get(config.model_type, ""): config.model_type in OWN_WAYS,
        f"runs attention as '{implementation}', which takes no tree mask; load it with "
        "attn_implementation='sdpa' (or 'eager')": implementation not in ("eager", "sdpa"),
    }
    for fault, found in faults.items():
        if found:
            raise SpecdecError(f"{role}: {type(model).__name__} {fault}.")
    return _window(config, type(model).__name__, role)


def _reads_both_ways(model: PreTrainedModel, config: Any) -> bool:
    # Some causal models leave is_decoder at False too; they have no mask for the other direction.
    module = sys.modules[type(model).__module__]
    return not getattr(config, "is_decoder", True) and hasattr(module, "create_bidirectional_mask")


def _window(config: Any, name: str, role: str) -> Window:
    size = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if size is not None else "full_attention"]
    strange = sorted(set(types) - KNOWN_LAYERS)
    if strange:
        raise SpecdecError(
            f"{role}: {name} has layers of type {', '.join(strange)}, whose state specdec cannot "
            "roll back after a rejected draft; use a model with full or sliding attention only."
        )
    return Window(frozenset(types), size or 0)


def _cache_argument(model: PreTrainedModel) -> str:
    # transformers renamed `past_key_values` to `cache` in the middle of the supported range.
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
