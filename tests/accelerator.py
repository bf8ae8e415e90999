"""An accelerator that is not there: tensors that say they live on one, and a count of who waits for it.

`pretended()` is a context in which the device `ACCELERATOR` exists. Its tensors are computed on the
CPU, but like on a real accelerator their values can only be used by the host after a
synchronisation, and every operation that needs one is noted: reading values, a blocking copy in
either direction, operations whose result has a size that depends on values. Operations over
tensors of two devices are errors, as on a real one.

The device stays registered with torch for the rest of the process: use a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import host, sampling

ACCELERATOR = torch.device("privateuseone:0")

PACKAGE = str(Path(host.__file__).parent)
"""specdec's own code."""

aten = torch.ops.aten
VALUE_SIZED = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten._unique.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor, aten.bincount.default,
    aten.equal.default, aten.is_nonzero.default, aten.allclose.default,
}  # fmt: skip
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Remote(Tensor):
    """A tensor on the accelerator; `here` holds its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Remote:
        made = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, device=ACCELERATOR, requires_grad=False,
        )  # fmt: skip
        made.here = here
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Remote({self.here!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the mode Pretended")


class Pretended(TorchDispatchMode):
    """While it lasts the accelerator exists.

    Attributes:
        waits: where the host waited for the device: the names of specdec's functions on the stack.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs = [each for each in _flat((args, kwargs)) if isinstance(each, Tensor)]
        remote = [each for each in inputs if isinstance(each, Remote)]
        asked = kwargs.get("device")
        if not remote and asked != ACCELERATOR:
            return func(*args, **kwargs)
        self._look(func, args, kwargs, inputs, remote)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        result = func(*_unwrap(args), **{name: _unwrap(value) for name, value in kwargs.items()})
        if func is aten._local_scalar_dense.default or (asked is not None and asked != ACCELERATOR):
            return result
        if func is aten.copy_.default and not isinstance(args[0], Remote):
            return args[0]
        # In-place operations return the tensor that they were given, all others a new one.
        return _wrap(result, {id(each.here): each for each in remote})

    def _look(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], remote: list[Remote]
    ) -> None:
        local = [each for each in inputs if not isinstance(each, Remote)]
        if func is aten._local_scalar_dense.default or func in VALUE_SIZED:
            self._wait()
        elif func in (aten._to_copy.default, aten.copy_.default):
            crosses = bool(local) or kwargs.get("device", ACCELERATOR) != ACCELERATOR
            if crosses and not kwargs.get("non_blocking") and not _called_from(host.send):
                self._wait()
        elif func in INDEXED:
            indices = [each for each in args[1] if each is not None]
            if any(not isinstance(each, Remote) or each.dtype == torch.bool for each in indices):
                self._wait()
        elif any(each.dim() for each in local):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")

    def _wait(self) -> None:
        own = [frame for frame in _stack() if PACKAGE in frame.f_code.co_filename]
        self.waits.append([frame.f_code.co_name for frame in reversed(own)])


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        yield tree
        return
    for each in tree:
        yield from _flat(each)


def _wrap(value: Any, known: dict[int, Remote]) -> Any:
    if isinstance(value, Tensor):
        return known[id(value)] if id(value) in known else Remote(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(each, known) for each in value)
    return value


def _unwrap(value: Any) -> Any:
    if isinstance(value, Remote):
        return value.here
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrap(each) for each in value)
    return value


def _stack() -> Iterator[FrameType]:
    """The frames of the call, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _called_from(function: Any) -> bool:
    return any(frame.f_code is function.__code__ for frame in _stack())


def move(module: nn.Module) -> None:
    """Put the module's parameters and buffers on the accelerator."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(Remote(weight.detach()), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Remote(buffer)


def available() -> bool:
    """Whether this torch can be told of a device in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@contextmanager
def pretended() -> Iterator[Pretended]:
    """The accelerator exists. Random numbers come from a generator on the CPU."""
    if ACCELERATOR.type not in dir(torch):
        backend_registration._setup_privateuseone_for_python_backend()
    real = sampling.Sampler._generator
    sampling.Sampler._generator = lambda self, device: real(self, torch.device("cpu"))  # type: ignore[method-assign]
    # torch.tensor(..., device=...) then makes a tensor on the CPU and copies it, in two operations.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with Pretended() as mode:
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        sampling.Sampler._generator = real  # type: ignore[method-assign]
