"""The JSON schema of a configuration, made from the declared parameters of all that is registered.

Editors complete and check a YAML file with it: `specdec schema > specdec.schema.json`, and
`# yaml-language-server: $schema=specdec.schema.json` as the first line of the file.
"""

from __future__ import annotations

from typing import Any

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
