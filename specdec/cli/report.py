"""`specdec report`: what benchmark runs found, as tables and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write; by default the first run's folder.")
    ] = None,
) -> None:
    """Print the tables, and write report.html, report.md, report.csv and speedup.svg."""
    from specdec.bench.report import write_report

    where = out or runs[0]
    typer.echo(write_report(runs, where))
    typer.echo(f"report: {where / 'report.html'}", err=True)
