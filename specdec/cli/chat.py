"""`specdec chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli._common import ConfigFile, Settings, messages, one_line, quiet_transformers
from specdec.errors import SpecdecError
from specdec.text import encode

if TYPE_CHECKING:
    from specdec.decoder import GenerationOutput, SpeculativeDecoder

HELP = """\
/stats           what the last answer took
/policy NAME     go on with another length policy (its defaults)
/drafter NAME    go on with another drafter; none decodes plainly
/reset           forget the conversation
/quit            leave (as does Ctrl-D); Ctrl-C stops an answer"""


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    config: ConfigFile = None,
    settings: Settings = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Show accepted draft tokens in colour.")
    ] = False,
) -> None:
    """Talk to the target. Answers stream; each turn reads only what is new.

    /help lists the commands.
    """
    from specdec.config import read

    quiet_transformers()
    conversation = Conversation(read(config, settings or ()).build(), show_drafts)
    messages().print("Ctrl-D leaves, /help lists the commands.", style="dim")
    while (line := _ask()) is not None:
        try:
            if line.startswith("/"):
                if not conversation.command(*line[1:].split(maxsplit=1)):
                    return
            elif line:
                conversation.answer(line)
        except SpecdecError as error:
            messages().print(str(error), style="red", markup=False)


class Conversation:
    """What was said so far, and the decoder that answers."""

    def __init__(self, decoder: SpeculativeDecoder, show_drafts: bool) -> None:
        self.decoder, self.show_drafts = decoder, show_drafts
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.said: list[dict[str, str]] = []
        self.last: GenerationOutput | None = None

    def answer(self, question: str) -> None:
        """Answer on stdout, piece by piece; Ctrl-C ends the answer there and keeps it so."""
        said = [*self.said, {"role": "user", "content": question}]
        ids = encode(self.decoder.tokenizer, said, chat=None)
        stream = self.decoder.stream(ids, continue_from=self.last)
        with _interrupts() as seen:
            for piece in stream:
                print(
                    self._coloured(stream.parts) if self.show_drafts else piece, end="", flush=True
                )
                if seen:
                    stream.close()
        print()
        assert stream.output is not None
        self.last = stream.output
        self.said = [*said, {"role": "assistant", "content": stream.output.text}]

    def command(self, name: str = "", argument: str = "") -> bool:
        """Do what `/name argument` says; False to leave."""
        console = messages()
        if name in ("quit", "exit"):
            return False
        if name == "stats":
            console.print(one_line(self.last.statistics) if self.last else "nothing said yet")
        elif name == "reset":
            self.reset()
        elif name in ("policy", "drafter") and argument:
            self._exchange(name, argument)
        else:
            console.print(HELP, highlight=False, markup=False)
        return True

    def _exchange(self, part: str, name: str) -> None:
        if part == "policy":
            self.decoder.set_policy(name)
        else:
            self.decoder.set_drafter(name)
        messages().print(f"{part} {name}", style="dim")

    @staticmethod
    def _coloured(parts: list[tuple[str, bool]]) -> str:
        return "".join(f"\033[32m{text}\033[0m" if drafted else text for text, drafted in parts)


def _ask() -> str | None:
    """The next line; None at its end. Ctrl-C clears what was typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            return None


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C only adds to this list: the round at hand is finished, and the caches stay whole."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
