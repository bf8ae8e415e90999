"""Questions: Spec-Bench's JSONL form, any JSONL with prompts, a data set by name, or our own few."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from specdec.errors import SpecdecError
from specdec.params import Params
from specdec.training.files import PROMPT_KEYS, data_set, read_jsonl, user_turns

BUILT_IN = Path(__file__).with_name("questions.jsonl")
SPEC_BENCH = "spec-bench"
SPEC_BENCH_FILES = ("spec_bench.jsonl", "spec_bench_*.jsonl", "spec_bench/question.jsonl")
MT_BENCH = "MT-Bench"
MT_BENCH_CATEGORIES = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
}  # fmt: skip
COLUMNS = (MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")
"""The columns of the papers' tables, in their order."""


class QuestionSettings(Params):
    """Which questions are asked; the `questions:` section of a benchmark's configuration."""

    source: str = Field(
        "builtin",
        description="a JSONL file, `spec-bench` (searched for), a folder or the name of a data set "
        "(NAME or NAME:SPLIT), or `builtin` for the few questions that come with specdec",
    )
    per_category: int | None = Field(
        None, ge=1, description="only the first so many of each category"
    )
    categories: list[str] | None = Field(None, description="only these categories")
    turns: int | None = Field(
        None, ge=1, description="only the first so many turns of a conversation"
    )


@dataclass(frozen=True)
class Question:
    """What a user asks, turn by turn.

    Attributes:
        id: unique in its set.
        category: as the file says; `column` is the papers' (the eight MT-Bench categories are one).
        turns: the user's messages.
    """

    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def column(self) -> str:
        return MT_BENCH if self.category in MT_BENCH_CATEGORIES else self.category


def load_questions(settings: QuestionSettings, folder: Path | None = None) -> list[Question]:
    """The questions, categories taking turns, so that a run that is cut short has some of each.

    Args:
        folder: where a relative path starts, before the current folder.

    Raises:
        SpecdecError: no such source, a row without a question, or nothing left to ask.
    """
    by_category: dict[str, list[Question]] = defaultdict(list)
    for question in _read(settings.source, folder or Path()):
        turns = question.turns[: settings.turns]
        by_category[question.category].append(Question(question.id, question.category, turns))
    wanted = settings.categories or list(by_category)
    unknown = [name for name in wanted if name not in by_category]
    if unknown:
        raise SpecdecError(
            f"questions.categories: {settings.source} has none of {', '.join(unknown)}; it has "
            f"{', '.join(by_category)}."
        )
    chosen = [by_category[name][: settings.per_category] for name in wanted]
    longest = max(map(len, chosen), default=0)
    taken = [one[place] for place in range(longest) for one in chosen if place < len(one)]
    if not taken:
        raise SpecdecError(f"questions.source: {settings.source} holds no questions.")
    return taken


def fingerprint(questions: Iterable[Question]) -> str:
    """A hash of all that is asked."""
    text = json.dumps([[q.id, q.category, q.turns] for q in questions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def column_order(columns: Iterable[str]) -> list[str]:
    """The papers' columns in their order, then the others by name."""
    found = set(columns)
    return [c for c in COLUMNS if c in found] + sorted(found - set(COLUMNS))


def _read(source: str, folder: Path) -> Iterator[Question]:
    seen: set[str] = set()
    for number, row in enumerate(_rows(source, folder), 1):
        turns = user_turns(row)
        if not turns:
            raise SpecdecError(
                f"questions.source: {source}, row {number}: no question found (keys: "
                f"{', '.join(row)}); expected turns, messages, {', '.join(PROMPT_KEYS)}."
            )
        name = str(row.get("question_id", row.get("id", number)))
        if name in seen:
            raise SpecdecError(f"questions.source: {source}: question_id {name} is there twice.")
        seen.add(name)
        yield Question(name, str(row.get("category", "questions")), turns)


def _rows(source: str, folder: Path) -> Iterable[dict[str, Any]]:
    if source == "builtin":
        return read_jsonl(BUILT_IN)
    if source == SPEC_BENCH:
        return read_jsonl(_find_spec_bench(folder))
    path = Path(source).expanduser()
    for place in (folder / path, path):
        if place.is_file():
            return read_jsonl(place)
        if place.is_dir():
            return data_set(str(place), "test", "questions.source")
    if path.suffix in (".jsonl", ".json") or source.startswith((".", "/", "~")):
        raise SpecdecError(f"questions.source: there is no file {path}.")
    return data_set(source, "test", "questions.source")


def _find_spec_bench(folder: Path) -> Path:
    """Spec-Bench's questions, in a folder `data` or `shared/data` here or in a folder above."""
    here = Path.cwd()
    for place in dict.fromkeys([folder.absolute(), here, *here.parents]):
        for data in (place / "data", place / "shared" / "data"):
            for pattern in SPEC_BENCH_FILES:
                for found in sorted(data.glob(pattern)):
                    return found
    raise SpecdecError(
        "questions.source: Spec-Bench is not here. Save its question.jsonl (from the repository "
        "hemingkx/Spec-Bench) as data/spec_bench.jsonl, or name a file: --set "
        "questions.source=FILE; --set questions.source=builtin asks the few questions that come "
        "with specdec."
    )
