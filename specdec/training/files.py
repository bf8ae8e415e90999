"""The files of a data folder, read with errors that say where, and written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError

PROMPT_KEYS = ("prompt", "question", "instruction")
"""Keys of a row that hold one message of a user."""


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a line that is none is named in the error."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise SpecdecError(f"{path}, line {number}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise SpecdecError(f"{path}, line {number}: expected an object, found {row!r}")
                yield row
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error


def user_turns(row: dict[str, Any]) -> tuple[str, ...]:
    """A user's messages in a row of questions, whichever of the usual keys has them; () if none.

    `turns` is a list of them, `messages` a chat of which the user's are taken, and each of
    `PROMPT_KEYS` is one message.
    """
    if row.get("turns"):
        return tuple(map(str, row["turns"]))
    if row.get("messages"):
        return tuple(str(m["content"]) for m in row["messages"] if m.get("role") == "user")
    return tuple(str(row[key]) for key in PROMPT_KEYS if row.get(key))[:1]


def data_set(source: str, split: str, where: str) -> Iterable[dict[str, Any]]:
    """The rows of a data set by its name, `NAME` or `NAME:SPLIT`.

    Args:
        split: which one, where the name does not say.
        where: what named it, for error messages.
    """
    name, _, chosen = source.partition(":")
    try:
        import datasets
    except ImportError:
        raise SpecdecError(
            f"{where}: {source} is no file, and to read it as the name of a data set needs the "
            "package datasets (pip install datasets)."
        ) from None
    try:
        return datasets.load_dataset(name, split=chosen or split)
    except Exception as error:
        raise SpecdecError(
            f"{where}: {source} is neither a file nor a data set that can be loaded: {error}."
        ) from error


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What a record that was found has otherwise than the one that is wanted; empty if nothing."""
    other = [key for key in wanted if found.get(key) != wanted[key]]
    return ", ".join(f"{key}: {found.get(key)!r} there, {wanted[key]!r} now" for key in other)


def contents(items: Sequence[object]) -> str:
    """How many items there are, and a mark that others do not have, for a record."""
    mark = hashlib.blake2b(digest_size=4)
    for item in items:
        mark.update(repr(item).encode())
    return f"{len(items)} ({mark.hexdigest()})"


def shards(folder: Path) -> list[Path]:
    """The complete shards of a data folder, in order; they must be numbered without a gap."""
    found = sorted(folder.glob("shard-?????.jsonl"))
    for number, path in enumerate(found):
        if path.name != f"shard-{number:05d}.jsonl":
            raise SpecdecError(f"{folder}: shard {number} is missing, though {path.name} is there")
    return found


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every row of a data folder, in order."""
    for path in shards(folder):
        yield from read_jsonl(path)


def read_stats(shard: Path) -> Counter[str]:
    """What was made and dropped in a shard."""
    return Counter(read_json(stats_path(shard)))


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SpecdecError(f"{path}: not a JSON object ({error})") from error


def stats_path(shard: Path) -> Path:
    return shard.with_suffix(".stats.json")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that is either there in full or not at all, also after a power cut.

    Raises:
        SpecdecError: the disk is full, or the folder cannot be written to.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise SpecdecError(
            f"cannot write {path}: {error.strerror}; what was complete before is kept"
        ) from error
