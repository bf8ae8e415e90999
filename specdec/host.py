"""The two doors between host and device.

All that the loop reads back goes through `read`, so that synchronisations can be counted; all small
lists that it sends go through `send`, which makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostReads:
    """Counts reads of device tensors; each is a synchronisation on an accelerator."""

    count = 0


def read(tensor: Tensor) -> list[Any]:
    """The tensor's values as nested lists. Waits for the device."""
    HostReads.count += 1
    return tensor.tolist()


def send(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of `values` on the device, without waiting for it.

    A copy from ordinary memory makes the host wait for everything the device has queued; one from
    pinned memory is queued behind it.
    """
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
