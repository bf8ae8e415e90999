"""What a drafter is trained to do: predict the target's distribution, and its next feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Distance = Literal["kl", "tv"]

CHUNK = 128
"""Positions whose logits exist at a time: few enough to stay in a CPU's cache."""


@dataclass(frozen=True)
class OutputRows:
    """The target's output layer, cut to the tokens that the drafter learns.

    Attributes:
        weight: `[Vd, H]`.
        bias: `[Vd]` or None.
        ids: `[Vd]` the target's ids of these rows; None when they are all of them.
    """

    weight: Tensor
    bias: Tensor | None
    ids: Tensor | None

    @classmethod
    def of(cls, layer: nn.Module, ids: Tensor | None, dtype: torch.dtype) -> OutputRows:
        weight, bias = layer.weight, getattr(layer, "bias", None)
        assert isinstance(weight, Tensor)
        rows = slice(None) if ids is None else ids
        return cls(
            weight.detach()[rows].to(dtype).contiguous(),
            None if bias is None else bias.detach()[rows].to(dtype),
            ids,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """`[N, H]` -> `[N, Vd]` in float32."""
        return functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).float()

    def token(self, index: Tensor) -> Tensor:
        """The target's ids of these rows."""
        return index if self.ids is None else self.ids[index]


@dataclass
class Distilled:
    """Sums and single values over N positions and S steps ahead.

    Attributes:
        loss: `[S]` sums over positions, differentiable.
        agreed: `[S, N]` whether the drafter's best token is the target's.
        acceptance: `[S, N]` Σ min(p, q), the chance that a token drawn from q is accepted.
    """

    loss: Tensor
    agreed: Tensor
    acceptance: Tensor


def distill(
    students: Tensor, teacher: Tensor, norm: Tensor, best: Tensor, output: OutputRows, by: Distance
) -> Distilled:
    """Distance of the drafter's distributions q from the target's p, through one output layer.

    kl: Σ p log(p / q) without its constant; tv: 1 - Σ min(p, q), which is the chance of a rejection
    (Leviathan et al. 2023). p is exact also when the drafter knows fewer tokens: its mass on the
    others counts for nothing (kl) or as rejected (tv).

    The logits of all positions would take Vd / H times the memory of what they are made of, so loss
    and gradient are computed together, chunk by chunk.

    Args:
        students: `[S, N, H]` what the drafter gives to the output layer, for S steps ahead.
        teacher: `[N, H]` the target's features.
        norm: `[N]` logsumexp of the target's logits over its whole vocabulary.
        best: `[N]` the target's most probable token.
    """
    return Distilled(*_Distill.apply(students, teacher, norm, best, output, by))


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        students: Tensor,
        teacher: Tensor,
        norm: Tensor,
        best: Tensor,
        output: OutputRows,
        by: Distance,
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, count, _ = students.shape
        loss = students.new_zeros(steps, dtype=torch.float32)
        agreed = torch.zeros(steps, count, dtype=torch.bool, device=students.device)
        acceptance = students.new_zeros(steps, count, dtype=torch.float32)
        gradient = torch.empty_like(students)
        for start in range(0, count, CHUNK):
            part = slice(start, start + CHUNK)
            p = (output.logits(teacher[part]) - norm[part, None].float()).exp_()
            for step in range(steps):
                logits = output.logits(students[step, part])
                top = logits.max(-1)
                q = logits.softmax(-1)
                common = torch.minimum(p, q).sum(-1)
                agreed[step, part] = output.token(top.indices) == best[part]
                acceptance[step, part] = common
                if by == "kl":
                    # The normaliser of q, from its largest entry.
                    norm_q = top.values - q.gather(-1, top.indices[:, None])[:, 0].log()
                    mass = p.sum(-1)
                    loss[step] += (norm_q * mass).sum() - (p * logits).sum()
                    slope = q.mul_(mass[:, None]).sub_(p)
                else:
                    loss[step] += len(p) - common.sum()
                    below = torch.where(q < p, q, 0)
                    slope = q.mul_(below.sum(-1, keepdim=True)).sub_(below)
                gradient[step, part] = slope.to(output.weight.dtype) @ output.weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agreed, acceptance)
        return loss, agreed, acceptance

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0][:, None, None].to(gradient.dtype), None, None, None, None, None


def feature_loss(predicted: Tensor, features: Tensor) -> Tensor:
    """Smooth L1 between predicted and true features `[N, H]`: mean over H, summed over N (EAGLE)."""
    distance = functional.smooth_l1_loss(predicted.float(), features.float(), reduction="none")
    return distance.mean(-1).sum()
