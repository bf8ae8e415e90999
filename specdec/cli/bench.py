"""`specdec bench`: drafters and policies against each other and their peers, honestly timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli._common import Settings, messages, quiet_transformers, spaced_out

if TYPE_CHECKING:
    from specdec.bench.runner import Progress


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file with the grid.")],
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder. By default runs/NAME-HASH, another for every configuration. A run "
            "that was killed goes on where it was."
        ),
    ] = None,
) -> None:
    """Measure a grid of drafters and policies on real questions, and write a report.

    `accelerate launch -m specdec bench CONFIG` splits the questions over processes.
    """
    from specdec.bench.config import read
    from specdec.bench.report import write_report
    from specdec.bench.runner import BenchRun

    quiet_transformers()
    console = messages()
    checked = read(config, settings or ())
    for name, reason in checked.skipped.items():
        console.print(f"not measured: {name}: {reason}", markup=False)
    with _progress() as report:
        run = BenchRun(checked, out, report)
        run.run()
    if run.process == 0:
        typer.echo(write_report([run.folder.path], run.folder.path))
        typer.echo(f"report: {run.folder.path}/report.html", err=True)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar in a terminal; elsewhere a line every minute."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = messages()
    if not console.is_terminal:
        yield spaced_out(60, _print_line)
        return
    counts = TextColumn("{task.completed} of {task.total}")
    columns = (counts, BarColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=1)

        def show(now: Progress) -> None:
            bar.update(task, completed=now.done, total=now.total, description=_line(now))

        yield show


def _print_line(now: Progress) -> None:
    typer.echo(f"{now.done} of {now.total} answers, {_line(now)}", err=True)


def _line(now: Progress) -> str:
    if now.seconds_left is None:
        return now.doing
    return f"{now.seconds_left / 60:.1f} min left, {now.doing}"
