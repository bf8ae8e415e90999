"""`specdec plugins`: what is registered, where it comes from, and which parameters it takes."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from specdec.errors import SpecdecError
from specdec.params import suggest
from specdec.plugins import registry

if TYPE_CHECKING:
    from rich.console import RenderableType

    from specdec.plugins import Registration


def register(app: typer.Typer) -> None:
    app.command()(plugins)


def plugins(
    name: Annotated[
        str | None, typer.Argument(help="Show this drafter, policy or model in full.")
    ] = None,
) -> None:
    """List drafters, policies and models with their origin, or show one of them."""
    from rich.console import Console

    # In a pipe a line stays a line: grep finds names and origins together.
    console = Console(width=None if sys.stdout.isatty() else 200)
    if name is None:
        console.print(_overview())
        return
    found = [entries[name] for entries in registry().entries.values() if name in entries]
    if not found:
        names = [name for entries in registry().entries.values() for name in entries]
        raise SpecdecError(f"nothing is called '{name}'. {suggest(name, names)}")
    for entry in found:
        console.print(*_details(entry), sep="\n")


def _overview() -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table("kind", "name", "what it is", "origin", box=box.SIMPLE_HEAD, pad_edge=False)
    for kind, entries in registry().entries.items():
        for entry in entries.values():
            summary = "" if kind == "model" else entry.summary()
            table.add_row(kind, f"[bold]{entry.name}", summary, entry.origin)
        table.add_section()
    for plugin, reason in registry().broken.items():
        table.add_row("plugin", "", f"[red]skipped: {reason}", plugin)
    return table


def _details(entry: Registration) -> list[RenderableType]:
    from rich.text import Text

    title = Text.assemble((entry.name, "bold"), f"   {entry.kind}, {entry.origin}")
    if entry.kind == "model":
        doc = _reflow(inspect.getdoc(entry.value) or "")
        return [title, Text(f"\n{doc}\n" if doc else ""), Text(_place(entry.value))]
    cls = entry.load()
    doc = _reflow(inspect.getdoc(cls) or entry.summary())
    source = getattr(cls, "source", "")
    if source and source not in doc:
        doc += f"\n\nSource: {source}"
    return [title, Text(f"\n{doc}\n"), _parameter_table(cls), Text(_place(cls))]


def _parameter_table(cls: Any) -> RenderableType:
    from rich import box
    from rich.table import Table

    from specdec.schema import parameter_rows

    table = Table("parameter", "type", "default", "what it does", box=box.SIMPLE_HEAD)
    for row in parameter_rows(cls.Params):
        table.add_row(*map(escape, row))
    return table


def _reflow(doc: str) -> str:
    """Paragraphs as one line each; what is indented or a list stays as it is."""
    return re.sub(r"(?<=\S)\n(?=[^\s\-*|])", " ", doc)


def _place(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
