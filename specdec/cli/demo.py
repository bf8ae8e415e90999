"""`specdec demo`: one prompt, answered plainly and with drafts, side by side in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli._common import ConfigFile, Settings, quiet_transformers
from specdec.text import encode

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from specdec.decoder import GenerationOutput, SpeculativeDecoder

PROMPT = "Explain step by step how to make a cup of tea."
MOST_TOKENS = 128


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    config: ConfigFile = None,
    prompt: Annotated[str, typer.Option(help="What to answer.")] = PROMPT,
    settings: Settings = None,
) -> None:
    """Answer one prompt without drafts and with them, and compare."""
    from rich.console import Console

    from specdec.config import read
    from specdec.decoder import SpeculativeDecoder

    quiet_transformers()
    console = Console(highlight=False)
    short = [] if config else [f"generation.max_new_tokens={MOST_TOKENS}"]
    checked = read(config, [*short, *(settings or [])])
    decoder = checked.build()
    plain = SpeculativeDecoder(decoder.target, settings=decoder.settings, seed=decoder.seed)
    ids = encode(decoder.tokenizer, [{"role": "user", "content": prompt}], chat=None)
    console.print(f"[bold]{prompt}")
    for each in (plain, decoder):  # warm-up
        each.generate(ids, max_new_tokens=8)
    alone = _answer(console, "plain decoding", plain, ids)
    drafted = _answer(console, checked.title, decoder, ids)
    console.print(_table({"plain decoding": alone, checked.title: drafted}))
    if decoder.settings.temperature == 0:
        console.print(_same_text(alone.token_ids[0], drafted.token_ids[0]), style="dim")
    if drafted.statistics.diagnosis:
        console.print(drafted.statistics.diagnosis)


def _answer(
    console: Console, name: str, decoder: SpeculativeDecoder, ids: list[int]
) -> GenerationOutput:
    console.rule(f"[dim]{name}", align="left")
    stream = decoder.stream(ids)
    for piece in stream:
        print(piece, end="", flush=True)
    print()
    assert stream.output is not None
    return stream.output


def _table(outputs: dict[str, GenerationOutput]) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table("", *outputs, box=box.SIMPLE_HEAD)
    every = [output.statistics for output in outputs.values()]
    plain = every[0]
    rows = {
        "tokens/s": [f"{s.tokens_per_s:.1f}" for s in every],
        "speed-up": [f"{s.tokens_per_s / plain.tokens_per_s:.2f}" for s in every],
        "tokens per round τ": [f"{s.tau:.2f}" for s in every],
        "acceptance α": [f"{s.alpha:.2f}" if s.drafted else "-" for s in every],
        "mean draft length": [f"{s.mean_draft_length:.1f}" if s.drafted else "-" for s in every],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _same_text(one: list[int], other: list[int]) -> str:
    """Greedy texts are the same, but for ties that a lower precision breaks otherwise."""
    if one == other:
        return "The two texts are the same, token by token."
    pairs = zip(one, other, strict=False)
    first = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return (
        f"The texts differ from token {first + 1} on. In low precision two tokens can be as good as "
        "tied, and passes of another shape round differently: specdec check compares in float32."
    )
