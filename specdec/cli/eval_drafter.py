"""`specdec eval-drafter`: how well a drafter predicts its target on held-out questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli._common import ConfigFile, Settings, messages, quiet_transformers, spaced_out

if TYPE_CHECKING:
    from rich.console import RenderableType

    from specdec.evaluation import Evaluation
    from specdec.generation import GenerationSettings

MOST_TOKENS = 128


def register(app: typer.Typer) -> None:
    app.command("eval-drafter")(eval_drafter)


def eval_drafter(
    config: ConfigFile = None,
    data: Annotated[
        str,
        typer.Option(
            help="Questions: a JSONL file in Spec-Bench's form or with prompts, the name of a data "
            "set, or spec-bench, which is searched for. By default the few that come with specdec."
        ),
    ] = "builtin",
    settings: Settings = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many questions of each category.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how good a drafter is: acceptance by position, τ, c, and the speed-up they predict.

    Conversations are asked in full; answers that repeat themselves are left out. Answers are greedy
    and of 128 tokens at most, where the configuration does not say otherwise.
    """
    from specdec.bench.questions import QuestionSettings, load_questions
    from specdec.config import read
    from specdec.evaluation import evaluate, take

    quiet_transformers()
    checked = read(config, settings or ())
    questions = take(load_questions(QuestionSettings.model_validate({"source": data})), limit)
    decoder = checked.build()
    decoder.settings = _shortened(checked.generation)
    with _progress(len(questions)) as report:
        found = evaluate(decoder, questions, report)
    if as_json:
        about = {"combination": checked.title, "data": data, "questions": len(questions)}
        print(json.dumps(about | found.as_object(), ensure_ascii=False))
    else:
        _print(found, checked.title)


def _shortened(settings: GenerationSettings) -> GenerationSettings:
    if "max_new_tokens" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"max_new_tokens": MOST_TOKENS})


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar in a terminal; elsewhere a line every minute."""
    from rich.progress import Progress

    console = messages()
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("answering", total=total)
            yield lambda done: bar.update(task, completed=done)
        return

    def show(done: int) -> None:
        typer.echo(f"{done} of {total} questions", err=True)

    yield spaced_out(60, show, at_once=False)


def _print(found: Evaluation, title: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{title}")
    console.print(_table(found))
    by_position = " ".join(f"{alpha:.2f}" for alpha in found.overall.alpha_by_position)
    console.print(f"accepted by position: {by_position}")
    console.print(f"the pass that checks a draft takes {found.overall.check:.2f} plain passes")
    if found.looping:
        answers = found.looping + found.overall.answers
        console.print(f"{found.looping} of {answers} answers repeat themselves and are left out.")


def _table(found: Evaluation) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table(
        "", "answers", "τ", "α", "drafted", "c", "predicted", "measured", box=box.SIMPLE_HEAD
    )
    for name, score in {**found.by_category, "all": found.overall}.items():
        figures = (
            score.tau, score.alpha, score.draft_length, score.c,
            score.predicted_speedup, score.measured_speedup,
        )  # fmt: skip
        table.add_row(name, str(score.answers), *(f"{figure:.2f}" for figure in figures))
    return table
