"""`specdec check`: prove a combination of target, drafter and policy on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from specdec.cli._common import ConfigFile, Settings, messages, quiet_transformers
from specdec.text import encode

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.diagnosis import Diagnosis

QUESTIONS = (
    "Name the seven colours of the rainbow.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Translate to French: The train is late, and the train is full.",
    "Hi!",
)
BEGINNING = "I like tea. You like tea. I like"
"""For the sampling check: what comes next is open, and n-grams find something to repeat."""
MOST_TOKENS = 64


def register(app: typer.Typer) -> None:
    app.command()(check)


def check(config: ConfigFile = None, settings: Settings = None) -> None:
    """Prove the combination on this machine, and say what a round costs.

    Greedy decoding is compared with transformers in float32 (so on weights that are not packed),
    token by token; samples are compared with the target's exact distribution; a round is timed next
    to plain decoding. Exit code 1 when the text is not the target's.
    """
    from specdec.check import check_greedy, check_sampling, measure
    from specdec.config import read

    quiet_transformers()
    console = messages()
    checked = read(config, settings or ())
    tokens = min(MOST_TOKENS, checked.generation.max_new_tokens)
    generation = checked.generation.model_copy(update={"max_new_tokens": tokens})

    decoder = checked.build(checked.load_target(dtype="float32", pack=False))
    decoder.settings = generation
    prompts = [encode(decoder.tokenizer, [{"role": "user", "content": q}], None) for q in QUESTIONS]
    greedy = check_greedy(decoder, prompts)
    for question, result in zip(QUESTIONS, greedy, strict=True):
        _line(console, result.passed, "greedy", f"{result}   {question!r}")
    sampling = check_sampling(decoder, decoder.tokenizer(BEGINNING)["input_ids"])
    _line(console, sampling.passed, "sampling", str(sampling))
    if not sampling.drafted:
        console.print("       nothing was drafted there, so that says little about the drafter")

    decoder = checked.build()
    decoder.settings = generation
    cost = measure(decoder, prompts)
    _print_costs(console, cost)
    console.print(f"diagnosis: {cost.sentence()}", soft_wrap=True)
    if not (sampling.passed and all(result.passed for result in greedy)):
        raise typer.Exit(1)


def _line(console: Console, passed: bool, name: str, text: str) -> None:
    mark = "[green]ok[/]   " if passed else "[bold red]FAIL[/] "
    console.print(f"{mark} {name}: ", end="")
    console.print(text, markup=False, soft_wrap=True)


def _print_costs(console: Console, cost: Diagnosis) -> None:
    from rich import box
    from rich.table import Table

    table = Table("one round", "ms", "plain passes", box=box.SIMPLE_HEAD)
    rows = {
        f"draft, {cost.length:.1f} steps": cost.draft,
        "target's pass": cost.verify,
        "everything else": cost.other,
        "whole round": cost.round,
        "plain pass of the target": cost.plain,
    }
    for name, seconds in rows.items():
        table.add_row(name, f"{1000 * seconds:.2f}", f"{seconds / cost.plain:.2f}")
    console.print(table)
