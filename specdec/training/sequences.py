"""Training sequences from data folders, and the order in which they are trained on."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from specdec.errors import SpecdecError
from specdec.training.files import read_rows, shards


@dataclass(frozen=True)
class Text:
    """A conversation of the target.

    Attributes:
        name: the conversation's id.
        ids: its tokens.
        answers: (start, end) of each answer in it.
        greedy: the answers were decoded greedily.
    """

    name: str
    category: str
    ids: list[int]
    answers: tuple[tuple[int, int], ...]
    greedy: bool

    @property
    def trained(self) -> list[int]:
        """Positions whose distribution is learnt: those before each token of an answer."""
        return [i - 1 for start, end in self.answers for i in range(start, end)]


def load_texts(folders: Sequence[Path], max_length: int) -> list[Text]:
    """The conversations of data folders, cut to `max_length` tokens; a warning says how many are.

    Raises:
        SpecdecError: a folder holds no data.
    """
    texts = []
    found = lost = 0
    for folder in folders:
        if not shards(folder):
            raise SpecdecError(f"no training data in {folder}: make it with 'specdec data'")
        rows = groupby(read_rows(folder), key=lambda row: row["id"].rpartition("-")[0])
        for name, grouped in rows:
            turns = list(grouped)
            text = _join(name, turns, max_length)
            found += 1
            lost += sum(_behind(turn, max_length) for turn in turns)
            if text.answers:
                texts.append(text)
    if not found:
        raise SpecdecError(
            f"no conversations in {', '.join(map(str, folders))}: all were dropped when made"
        )
    if not texts:
        raise SpecdecError(f"no answer begins within {max_length} tokens: raise max_length")
    if lost:
        warnings.warn(
            f"max_length {max_length} cuts off {lost:,} tokens of answers, and leaves out "
            f"{found - len(texts):,} of {found:,} conversations whose answers begin behind it",
            stacklevel=2,
        )
    return texts


def _join(name: str, turns: list[dict], max_length: int) -> Text:
    """Turns of one conversation repeat each other: the last one holds all."""
    ids = (turns[-1]["prompt_ids"] + turns[-1]["answer_ids"])[:max_length]
    answers = []
    for turn in turns:
        whole = (turn["prompt_ids"] + turn["answer_ids"])[:max_length]
        # What ended an answer may stand there as another token: the template's.
        same = whole if ids[: len(whole)] == whole else whole[:-1]
        if ids[: len(same)] == same:
            answers.append((len(turn["prompt_ids"]), len(same)))
    kept = tuple((start, end) for start, end in answers if start < end)
    return Text(name, turns[-1]["category"], ids, kept, not turns[-1]["sampled"])


def _behind(turn: dict, max_length: int) -> int:
    """Tokens of an answer that stand behind `max_length`."""
    answer = len(turn["answer_ids"])
    return min(answer, max(0, len(turn["prompt_ids"]) + answer - max_length))


def split(texts: Sequence[Text], held_out: float) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts held out, told apart by their names alone."""
    apart: tuple[list[Text], list[Text]] = [], []
    for text in texts:
        mark = hashlib.blake2b(text.name.encode(), digest_size=4).digest()
        apart[int.from_bytes(mark, "little") < held_out * 2**32].append(text)
    return apart


def frequent_tokens(texts: Iterable[Text], size: int) -> list[int]:
    """The `size` most frequent tokens of the answers, in the order of their ids.

    What is left free, because the answers hold fewer, goes to the lowest ids (in byte-pair
    vocabularies the earliest merges).
    """
    counts: Counter[int] = Counter()
    for text in texts:
        for start, end in text.answers:
            counts.update(text.ids[start:end])
    chosen = [token for token, _ in counts.most_common(size)]
    missing = size - len(chosen)
    if missing > 0:
        seen = set(chosen)
        free = (token for token in range(size + len(chosen)) if token not in seen)
        chosen += [next(free) for _ in range(missing)]
    return sorted(chosen)


def batches(lengths: Sequence[int], tokens: int, seed: str) -> list[list[int]]:
    """All texts in batches of similar length, none of more than `tokens` tokens with padding.

    The same seed gives the same order.
    """
    draw = random.Random(seed)
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], draw.random()))
    made: list[list[int]] = []
    for index in order:
        # Sorted by length: the newest is the longest of its batch.
        if made and (len(made[-1]) + 1) * lengths[index] <= tokens:
            made[-1].append(index)
        else:
            made.append([index])
    draw.shuffle(made)
    return made
