"""Questions from elsewhere: a JSONL file or a data set by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.training.files import read_jsonl


def load_prompts(source: str) -> list[list[str]]:
    """The user turns of every conversation in a JSONL file or a `datasets` name.

    A line has `turns` (a list of user messages), or `prompt`, `question` or `instruction` (one
    message), or `messages` (a chat, of which the user's messages are taken).
    """
    path = Path(source)
    rows = read_jsonl(path) if path.suffix in {".jsonl", ".json"} else _dataset_rows(source)
    prompts = []
    for number, row in enumerate(rows, 1):
        turns = _user_turns(row)
        if not turns:
            raise SpecdecError(
                f"{source}, row {number}: no prompt found (keys: {', '.join(row)}); expected "
                "one of turns, messages, prompt, question, instruction"
            )
        prompts.append(turns)
    if not prompts:
        raise SpecdecError(f"{source} holds no prompts")
    return prompts


def _user_turns(row: dict[str, Any]) -> list[str]:
    if row.get("turns"):
        return [str(turn) for turn in row["turns"]]
    if row.get("messages"):
        return [str(m["content"]) for m in row["messages"] if m.get("role") == "user"]
    for key in ("prompt", "question", "instruction"):
        if row.get(key):
            return [str(row[key])]
    return []


def _dataset_rows(source: str) -> Iterator[dict[str, Any]]:
    name, _, split = source.partition(":")
    try:
        import datasets
    except ImportError:
        raise SpecdecError(
            f"prompts {source!r}: not a JSONL file, and reading it as a data set's name needs the "
            "package `datasets` (pip install datasets)"
        ) from None
    try:
        return iter(datasets.load_dataset(name, split=split or "train"))
    except Exception as error:
        raise SpecdecError(
            f"prompts {source!r}: neither a JSONL file nor a data set that `datasets` can load "
            f"({error})"
        ) from error
