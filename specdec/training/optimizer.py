"""The optimizer of a training run: Muon for matrices and AdamW for the rest, or AdamW for all.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) makes every update of a matrix
orthogonal, so that all of its directions are learnt at the same speed. A drafter trains for minutes
on little text: there it needs far fewer tokens than AdamW to reach the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from specdec.errors import SpecdecError

Kind = Literal["muon", "adamw"]


def make_optimizer(
    parameters: Iterable[nn.Parameter], kind: Kind, learning_rate: float, weight_decay: float
) -> Optimizer:
    """Either kind with one learning rate: Muon's updates are scaled to the size of AdamW's.

    The scale is that of Liu et al. 2025 (arXiv 2502.16982, eq. 4).

    Raises:
        SpecdecError: this torch has no Muon.
    """
    every = list(parameters)
    shared: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
    if kind == "adamw":
        return AdamW(every, betas=(0.9, 0.95), **shared)
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise SpecdecError(
            f"optimizer: muon comes with torch 2.9, and this is {torch.__version__}: update torch, "
            "or use adamw"
        )
    matrices = [parameter for parameter in every if parameter.ndim == 2]
    rest = [parameter for parameter in every if parameter.ndim != 2]
    parts = [muon(matrices, adjust_lr_fn="match_rms_adamw", **shared)]
    if rest:
        parts.append(AdamW(rest, betas=(0.9, 0.95), **shared))
    return Several(parts)


class Several(Optimizer):
    """Several optimizers that step, save and load as one. Their groups are the groups of this one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # Loading gave every part new groups.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
