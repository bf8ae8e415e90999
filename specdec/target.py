"""The target: the model whose output counts. Prefill, verify, commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec.cache import SlotCache
from specdec.draft import DraftTree, RoundOutcome
from specdec.errors import SpecdecError
from specdec.host import send
from specdec.model import CachedModel
from specdec.packing import PackedWeights

if TYPE_CHECKING:
    from specdec.state import GenerationState

PREFILL_CHUNK = 1024
"""Longest piece of a prompt in one pass: the mask of a piece is chunk x context."""


@dataclass
class TargetPass:
    """What the target computed over some tokens of each row.

    Attributes:
        logits: `[B, K, V]` raw. After `verify` K is N + 1: the root, then the nodes of the tree.
            After a piece of a prompt K is 1: the last token of each row's piece.
        features: `[B, T, H]` the output layer's input for every token of the pass, when the drafter
            needs it.
        starts: position of the first token of each row.
        counts: number of tokens of each row; those behind are padding.
    """

    logits: Tensor
    features: Tensor | None
    starts: list[int]
    counts: list[int]


class Target(CachedModel):
    """A decoder-only transformers model that can verify drafts.

    Args:
        model: loaded with `AutoModelForCausalLM`; quantised models work.
        tokenizer: only needed for text in and out.
        pack: keep a second copy of the linear layers' weights in the layout that a CPU with
            bfloat16 instructions reads; see `specdec.packing.PackedWeights`.

    Raises:
        SpecdecError: the model cannot be rolled back (encoder-decoder, recurrent state, ...), or
            not be packed.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, pack: bool = False
    ) -> None:
        super().__init__(model, role="target")
        if pack:
            self.packed = PackedWeights(model)
        self.model.eval()
        self.tokenizer = tokenizer

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        device_map: Any = None,
        attn_implementation: str | None = None,
        pack: bool = False,
    ) -> Target:
        """Load a registered name, a hub id or a folder, with its tokenizer.

        Raises:
            SpecdecError: no such model, one that cannot be used, or one that cannot be packed.
        """
        loaded, tokenizer = load_pretrained(
            model,
            role="target",
            dtype=dtype,
            device=device,
            device_map=device_map,
            attn_implementation=attn_implementation,
        )
        return cls(loaded, tokenizer, pack=pack)

    @property
    def default_eos(self) -> int | list[int] | None:
        """The ids that end a text by the model's own generation config, as in transformers."""
        config = getattr(self.model, "generation_config", None) or self.config
        return getattr(config, "eos_token_id", None)

    def prefill(
        self, state: GenerationState, starts: list[int], counts: list[int], features: bool
    ) -> TargetPass:
        """One piece of each row's prompt; `logits [B, 1, V]` of the last token of each row's piece."""
        longest = max(counts)
        offsets = torch.arange(longest, device=state.device)
        first = send(starts, state.device)[:, None]
        index = (first + offsets).clamp_max(state.ids.shape[1] - 1)
        last = send(counts, state.device)[:, None] - 1
        done = self.forward(
            state.ids.gather(1, index),
            state.cache,
            starts,
            keep=last.clamp_min(0),
            features=features,
        )
        state.cache.lengths = [start + n for start, n in zip(starts, counts, strict=True)]
        return TargetPass(done.logits, done.features, starts, counts)

    def verify(self, tree: DraftTree, state: GenerationState, features: bool) -> TargetPass:
        """One forward pass over the root and the nodes of each row's tree."""
        tokens = torch.cat([state.roots[:, None], tree.tokens], dim=1)
        starts = list(state.cache.lengths)
        visible = positions = None
        if not tree.is_chain:
            visible = tree.ancestors
            positions = state.last_positions[:, None] + tree.depths
        done = self.forward(
            tokens, state.cache, starts, visible=visible, positions=positions, features=features
        )
        return TargetPass(done.logits, done.features, starts, [tree.size + 1] * state.batch_size)

    def commit(self, state: GenerationState, outcome: RoundOutcome) -> None:
        """Keep the root's and the accepted nodes' keys and values, forget the others'."""
        state.cache.keep_path(outcome.path, outcome.path_nodes)

    def new_cache(self, batch_size: int) -> SlotCache:
        return SlotCache(batch_size)


def pieces(starts: list[int], ends: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """`(starts, counts)` of the passes that read each row from its start to its end."""
    starts = list(starts)
    while starts != ends:
        counts = [min(PREFILL_CHUNK, end - at) for at, end in zip(starts, ends, strict=True)]
        yield starts, counts
        starts = [at + count for at, count in zip(starts, counts, strict=True)]


def load_pretrained(
    name: str,
    *,
    role: str,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """A causal LM and its tokenizer (None if there is none) by registered name, hub id or folder.

    Raises:
        SpecdecError: what could not be loaded, and why.
    """
    from specdec.plugins import resolve_model

    where = resolve_model(name)
    options = {"dtype": dtype, "device_map": device_map, "attn_implementation": attn_implementation}
    options = {key: value for key, value in options.items() if value is not None}
    try:
        model = AutoModelForCausalLM.from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        raise SpecdecError(
            f"{role}: cannot load model '{name}': {error}. Give a registered name (see 'specdec "
            "plugins'), a folder with a transformers checkpoint, or a hub id that can be reached."
        ) from error
    if device is not None:
        model.to(torch.device(device))  # type: ignore[arg-type]
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError):
        # A folder without a tokenizer is fine: token ids in, token ids out.
        tokenizer = None
    return model, tokenizer
