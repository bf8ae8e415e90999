"""The slot cache: keys and values in slots that each row fills and empties on its own.

A committed token's slot is its position. The nodes of a draft go into the slots behind the
committed ones; forgetting them is a change of length, and keeping a path of a tree moves only the
accepted slots. Buffers are allocated ahead and grown by doubling.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.host import send

INITIAL_SLOTS = 256


class SlotCache(Cache):
    """Keys and values of a transformers model, with a length for each row.

    Before each forward pass `place` says where its tokens go; `update` (called by every attention
    layer) writes them and returns the used part of the buffers, in place and without a copy.

    Attributes:
        lengths: committed slots of each row, on the host. Lowering one is a rollback.
        layers: one `SlotLayer` a model layer, with `keys` and `values` `[B, heads, S, head size]`.
    """

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, batch_size: int) -> None:
        super().__init__(layers=[])
        self.lengths = [0] * batch_size
        self._placement = Placement([0] * batch_size, 0)

    def place(self, starts: list[int], count: int) -> None:
        """The next forward pass writes `count` tokens of row b to the slots from `starts[b]` on."""
        self._placement = Placement(starts, count)

    @property
    def used(self) -> int:
        """Slots that the attention of the pass just placed reads."""
        return self._placement.used

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer())
        return self.layers[layer_idx].write(key_states, value_states, self._placement)

    def committed(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer up to the end of the longest row; nothing is copied."""
        layer = self.layers[layer_idx]
        used = max(self.lengths)
        return layer.keys[:, :, :used], layer.values[:, :, :used]

    def keep_path(self, path: Tensor, path_nodes: list[list[int]]) -> None:
        """Commit one path of each row's tree, root included, and forget the rest.

        Args:
            path: `[B, D]` slot of each path node behind the row's committed slots, in order.
            path_nodes: the same on the host, only as long as each row's path.
        """
        if any(nodes != list(range(len(nodes))) for nodes in path_nodes):
            longest = max(len(nodes) for nodes in path_nodes)
            base = send(self.lengths, path.device)
            source = base[:, None] + path[:, :longest]
            target = Placement(list(self.lengths), longest)
            for layer in self.layers:
                layer.move(source, target)
        for row, nodes in enumerate(path_nodes):
            self.lengths[row] += len(nodes)

    def keep_rows(self, rows: list[int]) -> None:
        """Only these rows stay; the others have finished."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            stay = send(rows, layer.keys.device)
            layer.keys, layer.values = layer.keys[stay], layer.values[stay]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)


class Placement:
    """Where the tokens of one forward pass are written: `count` slots of each row from `starts`."""

    def __init__(self, starts: list[int], count: int) -> None:
        self.starts = starts
        self.count = count
        self.used = max(starts, default=0) + count
        self.uniform = len(set(starts)) == 1
        self._index: tuple[Tensor, Tensor] | None = None

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row `[B, 1]` and slot `[B, count]` of every token; made once a pass, for all layers."""
        if self._index is None or self._index[0].device != device:
            starts = send(self.starts, device)[:, None]
            rows = torch.arange(len(self.starts), device=device)[:, None]
            self._index = rows, starts + torch.arange(self.count, device=device)
        return self._index


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, `[B, heads, slots, head size]`."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    keys: Tensor
    values: Tensor

    def write(self, keys: Tensor, values: Tensor, at: Placement) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, count, head size]` at its slots; returns the used part of the buffers."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._reserve(at.used)
        self._put(self.keys, keys, at)
        self._put(self.values, values, at)
        return self.keys[:, :, : at.used], self.values[:, :, : at.used]

    def move(self, source: Tensor, at: Placement) -> None:
        """Copy the slots `source [B, count]` to the slots of `at`."""
        rows = at.index(source.device)[0].to(self.keys.device)
        source = source.to(self.keys.device)
        for buffer in (self.keys, self.values):
            self._put(buffer, buffer[rows, :, source].transpose(1, 2), at)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(*key_states.shape[:2], INITIAL_SLOTS, key_states.shape[3])
        self.values = value_states.new_zeros(
            *value_states.shape[:2], INITIAL_SLOTS, value_states.shape[3]
        )
        self.is_initialized = True

    @staticmethod
    def _put(buffer: Tensor, new: Tensor, at: Placement) -> None:
        if at.uniform:
            buffer[:, :, at.starts[0] : at.starts[0] + at.count] = new
        else:
            rows, slots = at.index(buffer.device)
            buffer[rows, :, slots] = new.transpose(1, 2)

    def _reserve(self, slots: int) -> None:
        have = self.keys.shape[2]
        if slots <= have:
            return
        grown = max(slots, 2 * have)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], grown, old.shape[3])
            new[:, :, :have] = old
            setattr(self, name, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("SlotCache.update writes; a layer alone does not know where to.")

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # Masks are always handed over ready-made; this answer is never the one that counts.
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1
