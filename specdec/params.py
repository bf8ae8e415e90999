"""Declared parameters: one pydantic model per drafter and policy.

That declaration validates YAML and keyword arguments alike, names what is allowed in an error,
prints in `specdec plugins NAME` and makes the JSON schema for editors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from specdec.errors import SpecdecError


class Params(BaseModel):
    """Base of every parameter declaration: unknown names are refused."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, frozen=True)


class Configurable:
    """Something built from declared parameters: `SVIPPolicy(threshold=0.2)`.

    Raises:
        SpecdecError: an unknown parameter, a wrong type, or a value out of range.
    """

    Params: ClassVar[type[Params]] = Params
    params: Any

    def __init__(self, **parameters: Any) -> None:
        self.params = validate(self.Params, parameters, where=type(self).__name__)


def validate(model: type[BaseModel], values: dict[str, Any], where: str) -> Any:
    """Build `model` from `values`, or raise one readable SpecdecError that names `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SpecdecError("\n".join(explain(error, model, where))) from None


def explain(error: ValidationError, model: type[BaseModel], where: str) -> list[str]:
    """One line a fault: where it is, what was found, what is allowed, and the nearest match."""
    lines = []
    for fault in error.errors():
        path = ".".join([where, *(str(part) for part in fault["loc"])])
        if fault["type"] == "extra_forbidden":
            allowed = _fields_at(model, fault["loc"][:-1])
            lines.append(f"{path}: unknown key. {suggest(str(fault['loc'][-1]), allowed)}")
        elif fault["type"] == "missing":
            lines.append(f"{path}: missing; give it a value.")
        else:
            lines.append(f"{path}: {fault['msg']} (found {fault['input']!r}).")
    return lines


def suggest(name: str, allowed: Iterable[str]) -> str:
    """`Did you mean ...? Allowed: ...` for an unknown name."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    return f"{hint}Allowed: {', '.join(names) or 'none'}."


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        annotation = (
            model.model_fields[str(part)].annotation if part in model.model_fields else None
        )
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
