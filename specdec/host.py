"""The one door from the device to the host.

Everything that the loop reads back goes through here, so that synchronisations can be counted.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class HostReads:
    """Counts reads of device tensors; each is a synchronisation on an accelerator."""

    count = 0


def read(tensor: Tensor) -> list[Any]:
    """The tensor's values as nested lists. Waits for the device."""
    HostReads.count += 1
    return tensor.tolist()
