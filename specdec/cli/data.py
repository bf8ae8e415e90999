"""`specdec data`: training text that the target writes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli._common import messages, quiet_transformers, spaced_out

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from specdec.training.data import DataProgress
    from specdec.training.overlap import Overlap

FOUND = 1
"""Exit code when benchmark questions stand in the data."""


def register(app: typer.Typer) -> None:
    app.command()(data)


def data(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file with the settings.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file: --set seed=1"),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file with the questions of a benchmark: say whether they stand in the "
            "data that is there, and exit with 1 if they do. Nothing is written."
        ),
    ] = None,
) -> None:
    """Let the target write questions and answers, to train drafters on.

    Stops at answer_tokens; run it again to go on after a kill, or with a higher number.
    """
    from specdec.training.data import DataConfig, DataSynthesis
    from specdec.training.settings import load_target, read_settings

    quiet_transformers()
    chosen = read_settings(DataConfig, config, settings or [])
    target = load_target(chosen.target)
    if check is not None:
        raise typer.Exit(FOUND if _report_overlap(chosen.out, check, target.tokenizer) else 0)
    with _progress(chosen.answer_tokens) as report:
        totals = DataSynthesis(target, chosen).run(report)
    typer.echo(_summary(totals), err=True)
    if totals["answer_tokens"] < chosen.answer_tokens:
        typer.echo(f"These are the answers to all prompts of {chosen.prompts}.", err=True)


@contextmanager
def _progress(goal: int) -> Iterator[Callable[[DataProgress], None]]:
    """A bar in a terminal; elsewhere a line every minute."""
    from rich.progress import BarColumn, Progress, TextColumn

    console = messages()
    if not console.is_terminal:
        yield spaced_out(60, lambda now: typer.echo(_line(now), err=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("answer tokens", total=goal, line="")

        def show(now: DataProgress) -> None:
            bar.update(task, completed=min(now.answer_tokens, goal), line=_line(now))

        yield show


def _line(now: DataProgress) -> str:
    minutes = "?" if now.seconds_left == float("inf") else f"{now.seconds_left / 60:.0f}"
    counts = now.counts
    dropped = sum(number for name, number in counts.items() if name.startswith("dropped"))
    return (
        f"{now.answer_tokens:,} of {now.goal:,} ({now.tokens_per_s:.0f} tokens/s, {minutes} min "
        f"left); shard {now.shard}: {counts['rows']} rows, {counts['looping_answers']} answers "
        f"looped, {dropped} questions dropped"
    )


def _summary(totals: Counter[str]) -> str:
    return ", ".join(f"{totals[name]:,} {name.replace('_', ' ')}" for name in sorted(totals))


def _report_overlap(folder: Path, benchmark: Path, tokenizer: Any) -> bool:
    from specdec.errors import SpecdecError
    from specdec.training.files import read_rows, shards
    from specdec.training.overlap import find_overlap, questions_of

    if not shards(folder):
        raise SpecdecError(f"no data to check in {folder}: make it first, without --check")
    questions = questions_of(benchmark)
    texts = (
        (row["id"], tokenizer.decode(row["prompt_ids"] + row["answer_ids"]))
        for row in read_rows(folder)
    )
    overlaps = find_overlap(texts, questions)
    contaminated = [overlap for overlap in overlaps if overlap.contaminated]
    for overlap in contaminated:
        typer.echo(_describe(overlap))
    typer.echo(
        f"{len(contaminated)} of {len(questions)} questions of {benchmark} stand in {folder} (a "
        f"fifth or more of their word 8-grams); {len(overlaps) - len(contaminated)} others share "
        "some 8-gram with it"
    )
    return bool(contaminated)


def _describe(overlap: Overlap) -> str:
    return f"{overlap.share:4.0%} of {overlap.question[:80]!r}: rows {', '.join(overlap.rows[:5])}"
