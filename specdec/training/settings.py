"""Reading the YAML files of `specdec data` and `specdec train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from specdec.config import Places, TargetConfig, parse_file, parse_setting, put, read
from specdec.errors import SpecdecError
from specdec.params import Params, explain
from specdec.target import Target

Settings = TypeVar("Settings", bound=Params)


def read_settings(
    model: type[Settings],
    path: Path | None,
    changes: list[str],
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> Settings:
    """Check a YAML file, with `KEY=VALUE` changes put over it.

    Args:
        prepare: checks sections that need more than `model` says, and puts the outcome in their
            place.

    Raises:
        SpecdecError: no such file, unknown keys, wrong values; one line a fault, with its place.
    """
    places = Places()
    document = {} if path is None else parse_file(path, places, list(model.model_fields))
    with places.named():
        for change in changes:
            keys, value = parse_setting(change)
            places.of[tuple(keys)] = "--set "
            put(document, keys, value)
        if isinstance(document.get("target"), str):
            document["target"] = {"model": document["target"]}
        if prepare is not None:
            prepare(document)
        try:
            return model(**document)
        except ValidationError as error:
            faults = explain(error, model, "")
            raise SpecdecError("\n".join(fault.removeprefix(".") for fault in faults)) from None


def load_target(config: TargetConfig) -> Target:
    """The target of a training file, found as in a configuration for generating."""
    return read({"target": config.model_dump()}).load_target()
