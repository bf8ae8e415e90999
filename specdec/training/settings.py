"""Reading the YAML files of `specdec data` and `specdec train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from specdec.config import TargetConfig, read
from specdec.errors import SpecdecError
from specdec.params import Params, validate
from specdec.target import Target

Config = TypeVar("Config", bound=Params)


def read_settings(model: type[Config], path: Path | None, changes: list[str]) -> Config:
    """Check a YAML file, with `KEY=VALUE` changes put over it.

    `target: NAME` is short for `target: {model: NAME}`.

    Raises:
        SpecdecError: no such file, no YAML mapping, unknown keys, wrong values; one line a fault.
    """
    document = {} if path is None else _parse(path)
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise SpecdecError(f"--set {change}: expected KEY=VALUE, for instance seed=1")
        _put(document, key.split("."), yaml.safe_load(value), change)
    if isinstance(document.get("target"), str):
        document["target"] = {"model": document["target"]}
    checked: Config = validate(model, document, str(path or "settings"))
    return checked


def load_target(config: TargetConfig) -> Target:
    """The target of a training file, found as in a configuration for generating."""
    return read({"target": config.model_dump()}).load_target()


def _parse(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecdecError(f"{path}: not a YAML file ({error})") from error
    if not isinstance(document, dict):
        raise SpecdecError(f"{path}: expected keys and values, found {document!r}")
    return document


def _put(document: dict[str, Any], keys: list[str], value: Any, change: str) -> None:
    *parents, last = keys
    for key in parents:
        inner = document.setdefault(key, {})
        if isinstance(inner, str) and key == "target":
            inner = document[key] = {"model": inner}
        if not isinstance(inner, dict):
            raise SpecdecError(f"--set {change}: {key} is {inner!r}, which has no keys")
        document = inner
    document[last] = value
