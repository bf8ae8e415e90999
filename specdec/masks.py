"""Attention masks over slots: which slots each query of a pass may read."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.host import send


def causal(starts: list[int], count: int, used: int, device: torch.device) -> Tensor:
    """`[B or 1, count, used]` True where a query reads a slot: all slots up to its own.

    Query t of row b sits in slot `starts[b] + t`, and slots are positions.
    """
    if count == 1 and len(set(starts)) == 1:
        return torch.ones(1, 1, used, dtype=torch.bool, device=device)
    slots = torch.arange(used, device=device)
    own = _column(starts, device) + torch.arange(count, device=device)
    return slots <= own[:, :, None]


def behind_prefix(base: list[int], visible: Tensor, used: int) -> Tensor:
    """`[B, T, used]` True for all slots below `base[b]`, and behind them as `visible` says.

    Args:
        base: committed slots of each row; the draft's slots follow.
        visible: `[B or 1, T, K]` which of the K slots from `base[b]` on each query reads.
    """
    batch, count, width = len(base), visible.shape[1], visible.shape[2]
    visible = visible.expand(batch, -1, -1)
    if len(set(base)) == 1:
        prefix = visible.new_ones(batch, count, base[0])
        beyond = visible.new_zeros(batch, count, used - base[0] - width)
        return torch.cat([prefix, visible, beyond], dim=-1)
    slots = torch.arange(used, device=visible.device)
    behind = slots - _column(base, visible.device)
    index = behind.clamp(0, width - 1)[:, None].expand(-1, count, -1)
    inside = ((behind >= 0) & (behind < width))[:, None]
    return (behind < 0)[:, None] | (inside & visible.gather(2, index))


def slot_positions(base: list[int], positions: Tensor, used: int) -> Tensor:
    """`[B, used]` position of the token in every slot: the slot itself, then `positions` from `base`.

    Args:
        base: committed slots of each row.
        positions: `[B, K]` positions of the tokens in the K slots from `base[b]` on.
    """
    slots = torch.arange(used, device=positions.device).expand(len(base), -1)
    behind = slots - _column(base, positions.device)
    index = behind.clamp(0, positions.shape[1] - 1)
    return torch.where(behind < 0, slots, positions.gather(1, index))


def within_window(allowed: Tensor, queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Restrict `allowed [B, T, used]` to keys less than `window` positions back.

    Args:
        queries: `[B, T]` positions.
        keys: `[B, used]` positions.
    """
    return allowed & (keys[:, None, :] > queries[:, :, None] - window)


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, 1, T, used]`: 0 where reading is allowed, the lowest finite number elsewhere.

    The lowest finite number, not -inf: a query of padding may see nothing at all, and softmax over
    -inf alone is NaN.
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _column(values: list[int], device: torch.device) -> Tensor:
    return send(values, device)[:, None]
