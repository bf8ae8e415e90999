"""What several commands share: arguments, prompts, and how a generation is summed up."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.metrics import Statistics


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


def encode(tokenizer: Any, messages: list[dict[str, str]], chat: bool | None) -> list[int]:
    """Token ids of a conversation.

    Args:
        messages: `[{"role": "user", "content": ...}, ...]`.
        chat: whether to write them with the chat template; None does where there is one. Without it
            the messages' texts are simply put one after the other.

    Raises:
        SpecdecError: no tokenizer, or no chat template where one is asked for.
    """
    if tokenizer is None:
        raise SpecdecError("target.model: it has no tokenizer, and a prompt in text needs one.")
    if chat is None:
        chat = bool(tokenizer.chat_template)
    if not chat:
        return tokenizer("".join(message["content"] for message in messages))["input_ids"]
    if not tokenizer.chat_template:
        raise SpecdecError("--chat: the target's tokenizer has no chat template; use --no-chat.")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


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
