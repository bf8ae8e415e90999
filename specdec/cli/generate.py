"""`specdec generate`: answer one prompt, or several as a batch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli._common import Settings, messages, one_line, quiet_transformers, read_text
from specdec.errors import SpecdecError
from specdec.text import encode

if TYPE_CHECKING:
    from specdec.decoder import GenerationOutput, SpeculativeDecoder

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [-]",
        help="A YAML file, without one the defaults apply; - reads a prompt from standard input.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="A prompt. Several make a batch."),
]
PromptFiles = Annotated[
    list[str] | None,
    typer.Option("--prompt-file", metavar="FILE", help="A prompt from a file, or - for stdin."),
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Use the chat template; by default where there is one."),
]


def register(app: typer.Typer) -> None:
    app.command()(generate)


def generate(
    arguments: Arguments = None,
    prompts: Prompts = None,
    prompt_files: PromptFiles = None,
    settings: Settings = None,
    chat: Chat = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    show_tree: Annotated[
        bool, typer.Option("--show-tree", help="Draw the draft trees, accepted path marked.")
    ] = False,
) -> None:
    """Write behind one prompt, or behind several as a batch.

    The text goes to stdout, everything else to stderr.
    """
    config, files = _split(arguments or [], prompt_files or [])
    texts = [*(prompts or []), *map(read_text, files)]
    if not texts:
        raise SpecdecError("no prompt: give --prompt TEXT, --prompt-file FILE, or - for stdin.")
    from specdec.config import read

    quiet_transformers()
    decoder = read(config, settings or ()).build()
    ids = [encode(decoder.tokenizer, [{"role": "user", "content": text}], chat) for text in texts]
    if len(ids) == 1 and not as_json:
        output = _stream(decoder, ids[0], show_tree)
    else:
        output = decoder.generate(ids, keep_trees=show_tree)
        if as_json:
            print(json.dumps(as_object(texts, output), ensure_ascii=False))
        else:
            _print_batch(output)
    if show_tree:
        _print_trees(decoder, output)
    if not as_json:
        messages().print(one_line(output.statistics), style="dim")
        if output.statistics.diagnosis:
            messages().print(output.statistics.diagnosis, style="dim")


def as_object(prompts: list[str], output: GenerationOutput) -> dict[str, Any]:
    """What `--json` prints."""
    assert output.texts is not None
    results = zip(prompts, output.texts, output.token_ids, output.finish_reasons, strict=True)
    names = ("prompt", "text", "token_ids", "finish_reason")
    return {
        "results": [dict(zip(names, result, strict=True)) for result in results],
        "stats": asdict(output.statistics),
    }


def _split(arguments: list[str], files: list[str]) -> tuple[str | None, list[str]]:
    """The configuration, and the files to read prompts from: `-` may stand among the arguments."""
    configs = [argument for argument in arguments if argument != "-"]
    if len(configs) > 1:
        raise SpecdecError(
            f"expected one configuration (found {', '.join(configs)}); a prompt needs --prompt."
        )
    files = files + ["-"] * arguments.count("-")
    if files.count("-") > 1:
        raise SpecdecError("standard input can be read only once: give - once.")
    return (configs[0] if configs else None), files


def _stream(decoder: SpeculativeDecoder, ids: list[int], keep_trees: bool) -> GenerationOutput:
    stream = decoder.stream(ids, keep_trees=keep_trees)
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    assert stream.output is not None
    return stream.output


def _print_batch(output: GenerationOutput) -> None:
    assert output.texts is not None
    for number, text in enumerate(output.texts, start=1):
        messages().print(f"--- {number} of {len(output.texts)}", style="dim")
        print(text, flush=True)


def _print_trees(decoder: SpeculativeDecoder, output: GenerationOutput) -> None:
    from specdec.cli._trees import draw_rounds

    console = messages()
    for drawing in draw_rounds(output, decoder.tokenizer):
        console.print(drawing)
