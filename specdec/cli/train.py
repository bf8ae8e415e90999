"""`specdec train`: a drafter for a target, from text that the target wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli._common import messages, quiet_transformers, spaced_out

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from specdec.training.trainer import TrainProgress


def register(app: typer.Typer) -> None:
    app.command()(train)


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file: --set seed=1"),
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="End after this time, as max_minutes in the file.")
    ] = None,
) -> None:
    """Train a drafter: eagle2, glide or autoregressive.

    Run it again to go on after a kill. Several processes: accelerate launch -m specdec train CONFIG
    """
    from specdec.errors import SpecdecError
    from specdec.training.curves import draw_curves
    from specdec.training.settings import load_target, read_settings
    from specdec.training.trainer import TrainConfig, Trainer, check_drafter

    quiet_transformers()
    changes = list(settings or [])
    if max_minutes is not None:
        changes.append(f"max_minutes={max_minutes}")
    chosen = read_settings(TrainConfig, config, changes, check_drafter)
    target = load_target(chosen.target)
    with _live() as report:
        trainer = Trainer(chosen, target, report)
        where = trainer.run()
    if not trainer.accelerator.is_main_process:
        return
    try:
        draw_curves(chosen.out)
    except SpecdecError as error:
        typer.echo(f"specdec: {error}", err=True)
    typer.echo(str(where))


@contextmanager
def _live() -> Iterator[Callable[[TrainProgress], None]]:
    """A live table in a terminal; elsewhere a line every half a minute. Only from one process."""
    import os

    console = messages()
    if int(os.environ.get("RANK", "0")) > 0:
        yield lambda now: None
    elif console.is_terminal:
        with _table(console) as show:
            yield show
    else:
        yield spaced_out(30, _print_line, always=lambda now: bool(now.held_out))


@contextmanager
def _table(console: Console) -> Iterator[Callable[[TrainProgress], None]]:
    from rich.live import Live

    newest: dict[str, dict[str, Any]] = {"training": {}, "held out": {}}
    with Live(console=console, refresh_per_second=2) as live:

        def show(now: TrainProgress) -> None:
            newest["training"] = now.values or newest["training"]
            newest["held out"] = now.held_out or newest["held out"]
            live.update(_rows(now, newest))

        yield show


def _rows(now: TrainProgress, newest: dict[str, dict[str, Any]]) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(
        "", "step", "loss", "agreement by step ahead", "acceptance by step ahead", "τ",
        title=_title(now, newest["training"]), box=box.SIMPLE_HEAD, title_justify="left",
    )  # fmt: skip
    for name, values in newest.items():
        if values:
            table.add_row(
                name,
                str(values["step"]),
                f"{values['loss']:.3f}",
                _percent(values["agreement"]),
                _percent(values["acceptance"]),
                f"{values['tau']:.2f}" if "tau" in values else "",
            )
    return table


def _title(now: TrainProgress, values: dict[str, Any]) -> str:
    if now.stage == "target":
        return f"running the target over the texts: {now.done:.0%}"
    if not values:
        return f"training: {now.done:.0%}"
    return (
        f"training: {now.done:.0%}, epoch {values['epoch']:.2f}, {values['minutes']:.1f} min, "
        f"{values['tokens_per_s']:,.0f} tokens/s, learning rate {values['learning_rate']:.1e}"
    )


def _print_line(now: TrainProgress) -> None:
    values = now.values or now.held_out
    line = _title(now, now.values)
    if values:
        tau = f", τ {values['tau']:.2f}" if "tau" in values else ""
        kind = "held out: " if values.get("held_out") else ""
        line += (
            f"; {kind}loss {values['loss']:.3f}, agreement {_percent(values['agreement'])}, "
            f"acceptance {_percent(values['acceptance'])}{tau}"
        )
    typer.echo(line, err=True)


def _percent(values: list[float]) -> str:
    return " ".join(f"{value:.0%}" for value in values)
