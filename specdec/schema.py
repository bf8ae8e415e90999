"""The JSON schema of a configuration, made from the declared parameters of all that is registered.

Editors complete and check a YAML file with it: `specdec schema > specdec.schema.json`, and
`# yaml-language-server: $schema=specdec.schema.json` as the first line of the file.
"""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from specdec import plugins
from specdec.config import DEFAULTS, TargetConfig
from specdec.errors import SpecdecError
from specdec.generation import GenerationSettings


def schema() -> dict[str, Any]:
    """The schema; drafters and policies are told apart by their `name`."""
    definitions: dict[str, Any] = {}
    for kind in ("drafter", "policy"):
        definitions[kind] = _choice(kind, definitions)
    target = _parameters(TargetConfig, "target", definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "specdec configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "plugins": {
                "description": "plugins to load: names of modules, or paths of .py files",
                "type": "array",
                "items": {"type": "string"},
            },
            "target": {"anyOf": [{"type": "string"}, target]},
            "drafter": {"$ref": "#/$defs/drafter"},
            "policy": {"$ref": "#/$defs/policy"},
            "generation": _parameters(GenerationSettings, "generation", definitions),
            "seed": {
                "description": "of the random numbers; null draws another one each time",
                "type": ["integer", "null"],
                "minimum": 0,
            },
        },
        "$defs": definitions,
    }


def parameter_rows(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Name, type with limits, default and description of each parameter, for people."""
    rows = []
    for name, field in model.model_fields.items():
        limits = ", ".join(filter(None, map(_limit, field.metadata)))
        default = "required" if field.is_required() else json.dumps(field.default, default=str)
        kind = f"{_type(field.annotation)} {limits}".strip()
        rows.append((name, kind, default, field.description or ""))
    return rows


def _type(annotation: Any) -> str:
    """As one would say it in YAML: `list[int] | str | null`."""
    inner = get_args(annotation)
    if annotation is NoneType or annotation is Any:
        return "null" if annotation is NoneType else "any"
    if get_origin(annotation) is Literal:
        return " | ".join(map(json.dumps, inner))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type, inner))
    name = getattr(annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(map(_type, inner))}]" if inner else name


def _limit(limit: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return " ".join(f"{signs[key]} {getattr(limit, key)}" for key in signs if hasattr(limit, key))


def _choice(kind: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A name alone, or a mapping with the name and its parameters."""
    names = list(plugins.registry().entries[kind])
    variants = []
    for name in names:
        try:
            cls = plugins.registry().find(kind, name).load()
        except SpecdecError:
            continue  # what cannot be imported has no parameters to show
        variant = _parameters(cls.Params, f"{kind}-{name}", definitions)
        variant["description"] = getattr(cls, "summary", "")
        fields = variant.setdefault("properties", {})
        if "base" in fields:
            fields["base"] = {"$ref": f"#/$defs/{kind}"}
        if kind == "drafter":
            fields["expand"] = {
                "description": "a drafter that this one is wrapped in: its name, or a mapping",
                "type": ["string", "object"],
            }
        variant["properties"] = {"name": {"const": name}, **fields}
        if name != DEFAULTS[kind]["name"]:
            variant["required"] = ["name", *variant.get("required", [])]
        variants.append(variant)
    if kind == "drafter":
        names.append(plugins.NO_DRAFTER)
    return {"oneOf": [{"enum": names}, *variants]}


def _parameters(model: type[BaseModel], name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one declaration; what it defines goes to `definitions`."""
    made = model.model_json_schema(
        ref_template=f"#/$defs/{name}-{{model}}", schema_generator=_TolerantSchema
    )
    for inner, definition in made.pop("$defs", {}).items():
        definitions[f"{name}-{inner}"] = definition
    made.pop("title", None)
    return made


class _TolerantSchema(GenerateJsonSchema):
    """Anything goes for parameters that only Python can give, such as loaded models."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}
