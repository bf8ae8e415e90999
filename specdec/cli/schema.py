"""`specdec schema`: the JSON schema of configurations, for editors."""

from __future__ import annotations

import json

import typer


def register(app: typer.Typer) -> None:
    app.command()(schema)


def schema() -> None:
    """Print the JSON schema of configurations.

    Editors complete and check YAML files with it.
    """
    from specdec.schema import schema as make_schema

    print(json.dumps(make_schema(), indent=2))
