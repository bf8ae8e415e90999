"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG]", help="A YAML file. Without one the defaults apply."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the configuration: --set policy.threshold=0.2 (again and again).",
    ),
]
