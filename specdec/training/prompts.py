"""Questions from elsewhere: a JSONL file or a data set by name."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import SpecdecError
from specdec.training.files import PROMPT_KEYS, data_set, read_jsonl, user_turns


def load_prompts(source: str) -> list[list[str]]:
    """The user turns of every conversation in a JSONL file or a `datasets` name.

    `user_turns` says what a row may look like.
    """
    path = Path(source)
    rows = (
        read_jsonl(path)
        if path.suffix in {".jsonl", ".json"}
        else data_set(source, "train", "prompts")
    )
    prompts = []
    for number, row in enumerate(rows, 1):
        turns = list(user_turns(row))
        if not turns:
            raise SpecdecError(
                f"{source}, row {number}: no prompt found (keys: {', '.join(row)}); expected "
                f"one of turns, messages, {', '.join(PROMPT_KEYS)}"
            )
        prompts.append(turns)
    if not prompts:
        raise SpecdecError(f"{source} holds no prompts")
    return prompts
