"""Linear layers in the layout that the CPU's own matrix units read: the same weights, sooner done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from specdec.errors import SpecdecError


class PackedWeights:
    """Copies of a model's linear layers in oneDNN's blocked layout, in use inside a `with` block.

    PyTorch hands a weight to oneDNN row by row, in each call; for the few tokens of a round the
    product takes up to twice as long that way as from a weight that was laid out beforehand. The
    model itself is left as it is: outside the block (transformers' `generate`, saving, copying) it
    knows nothing of the copies, which take as much memory as the layers' weights. They are not made
    again when a weight changes.

    Args:
        model: its `nn.Linear` layers are packed; subclasses (quantised ones) and layers whose
            `forward` somebody has replaced are left alone.

    Raises:
        SpecdecError: not bfloat16, not on a CPU, or a CPU or PyTorch that cannot do it.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if _can_be_packed(layer)]
        _check(layers)
        self._forwards = [(layer, _packed_forward(layer)) for layer in layers]

    def __enter__(self) -> PackedWeights:
        for layer, forward in self._forwards:
            # Past `nn.Module.__setattr__`: this is done for every layer in every pass.
            layer.__dict__["forward"] = forward
        return self

    def __exit__(self, *exception: object) -> None:
        for layer, _ in self._forwards:
            layer.__dict__.pop("forward", None)

    def __len__(self) -> int:
        """Number of layers that are packed."""
        return len(self._forwards)


def lacking() -> str | None:
    """What this machine lacks to run packed bfloat16 layers; None when nothing does."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch is built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return f"PyTorch {torch.__version__} has no packed linear layer"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions that oneDNN uses"
    return None


def _check(layers: list[nn.Linear]) -> None:
    other = next((layer for layer in layers if layer.weight.dtype != torch.bfloat16), None)
    if not layers:
        fault: str | None = "the model has no plain linear layer"
    elif any(layer.weight.device.type != "cpu" for layer in layers):
        fault = "packing is for CPUs, and the model is on another device"
    elif other is not None:
        dtype = str(other.weight.dtype).removeprefix("torch.")
        fault = f"packing is for bfloat16, and the model has {dtype} weights"
    else:
        fault = lacking()
    if fault:
        raise SpecdecError(
            f"target.pack: {fault}. Leave it out (--set target.pack=false), or load the model in "
            "bfloat16 on a CPU that has it."
        )


def _can_be_packed(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and "forward" not in layer.__dict__


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    ops: Any = torch.ops.mkldnn
    weight = ops._reorder_linear_weight(layer.weight.detach(), None)
    bias: Tensor | None = layer.bias

    def forward(hidden: Tensor) -> Tensor:
        done: Tensor = ops._linear_pointwise(hidden, weight, bias, "none", [], "")
        return done

    return forward
