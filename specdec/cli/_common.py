"""What several commands share: arguments, prompts, and how a generation is summed up."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.metrics import Statistics


News = TypeVar("News")

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG]", help="A YAML file. Without one the defaults apply."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the configuration, --set policy.threshold=0.2 for instance. "
        "May be given several times.",
    ),
]


def messages() -> Console:
    """The console for everything but the text: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def quiet_transformers() -> None:
    """No progress bars and notes of transformers between the lines of a command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def spaced_out(
    seconds: float,
    show: Callable[[News], None],
    always: Callable[[News], bool] = lambda news: False,
    at_once: bool = True,
) -> Callable[[News], None]:
    """`show`, but not more often than every so many seconds: progress where there is no terminal.

    Args:
        always: news that are shown whenever they come.
        at_once: whether the first news are shown, or only those after the first interval.
    """
    last = -seconds if at_once else time.monotonic()

    def report(news: News) -> None:
        nonlocal last
        if always(news) or time.monotonic() - last >= seconds:
            last = time.monotonic()
            show(news)

    return report


def read_text(path: str) -> str:
    """A prompt from a file, or from standard input for `-`.

    Raises:
        SpecdecError: no such file, or no text in it.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecdecError(f"--prompt-file {path}: cannot be read: {error}.") from None
    if not text.strip():
        where = "standard input" if path == "-" else path
        raise SpecdecError(f"the prompt is empty: there is no text in {where}.")
    return text.removesuffix("\n")


def one_line(statistics: Statistics) -> str:
    """What a generation took, for people."""
    s = statistics
    line = f"{s.new_tokens} tokens in {s.wall_s:.2f} s ({s.tokens_per_s:.1f} tokens/s)"
    if not s.drafted:
        return line
    return (
        f"{line}; τ {s.tau:.2f}, α {s.alpha:.2f}, {s.mean_draft_length:.1f} drafted a round; "
        f"draft {s.draft_s:.2f} s, target {s.verify_s:.2f} s, other {s.other_s:.2f} s"
    )
