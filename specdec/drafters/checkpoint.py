"""Reading a drafter's checkpoint: a folder or a hub id with a config and one file of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from specdec.errors import SpecdecError


def read_json(checkpoint: str | Path, name: str = "config.json") -> dict[str, Any]:
    """One JSON file of a checkpoint.

    Raises:
        SpecdecError: no such checkpoint, no such file in it, or no JSON object in the file.
    """
    path = find(checkpoint, name)
    if path is None:
        raise SpecdecError(f"drafter checkpoint '{checkpoint}' has no {name}.")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise SpecdecError(
            f"drafter checkpoint '{checkpoint}': {name} is not JSON: {error}."
        ) from error
    if not isinstance(found, dict):
        raise SpecdecError(f"drafter checkpoint '{checkpoint}': {name} holds no mapping.")
    return found


def read_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The tensors of `model.safetensors` or `pytorch_model.bin`, on the CPU.

    Pickles are read with `weights_only`: nothing in them is executed.

    Raises:
        SpecdecError: neither file is there, or it cannot be read.
    """
    safe = find(checkpoint, "model.safetensors")
    path = safe or find(checkpoint, "pytorch_model.bin")
    if path is None:
        raise SpecdecError(
            f"drafter checkpoint '{checkpoint}' has no model.safetensors and no pytorch_model.bin."
        )
    try:
        state = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SpecdecError(
            f"drafter checkpoint '{checkpoint}': {path.name} cannot be read as weights: {error}"
        ) from error
    # Old releases stored this buffer, which the configuration determines.
    return {
        name: value for name, value in state.items() if not name.endswith("rotary_emb.inv_freq")
    }


def check_tensors(
    found: dict[str, Tensor], expected: dict[str, Tensor], checkpoint: str | Path, kind: str
) -> None:
    """Refuse a checkpoint with missing, unexpected or differently shaped tensors, all named.

    Args:
        kind: what it should be, `"an EAGLE head"` for instance.
    """
    missing, unexpected, reshaped = differing_tensors(found, expected)
    faults = [f"missing {', '.join(missing)}"] if missing else []
    faults += [f"unexpected {', '.join(unexpected)}"] if unexpected else []
    faults += [
        f"{name} is {list(found[name].shape)}, config.json says {list(expected[name].shape)}"
        for name in reshaped
    ]
    if faults:
        raise SpecdecError(
            f"drafter checkpoint '{checkpoint}' is not {kind} as its config.json describes: "
            f"{'; '.join(faults)}."
        )


def differing_tensors(
    found: dict[str, Tensor], expected: dict[str, Tensor]
) -> tuple[list[str], list[str], list[str]]:
    """Names that are missing, unexpected, and there in another shape; each in order."""
    return (
        sorted(expected.keys() - found.keys()),
        sorted(found.keys() - expected.keys()),
        sorted(n for n in expected.keys() & found.keys() if found[n].shape != expected[n].shape),
    )


def find(checkpoint: str | Path, name: str) -> Path | None:
    """One file of a checkpoint, from a folder or from the hub; None if the checkpoint has none."""
    try:
        found = cached_file(str(checkpoint), name, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise SpecdecError(
            f"drafter checkpoint '{checkpoint}': neither a folder nor a readable repository on the "
            f"hub ({str(error).splitlines()[0]})."
        ) from error
    return None if found is None else Path(found)
