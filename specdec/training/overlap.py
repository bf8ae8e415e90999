"""Texts that say the same: near-duplicates among questions, and benchmark questions in the data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdec.training.prompts import load_prompts


@dataclass
class Overlap:
    """How much of one benchmark question stands in the data: `share` of its word 8-grams."""

    question: str
    share: float
    rows: list[str]

    @property
    def contaminated(self) -> bool:
        """At least a fifth, the border that Touvron et al. (2023, Llama 2, A.6) call not clean."""
        return self.share >= 0.2


def find_overlap(
    texts: Iterable[tuple[str, str]], questions: Iterable[str], n: int = 8
) -> list[Overlap]:
    """Benchmark `questions` of which some run of `n` words stands in `texts` ((id, text) pairs).

    A question of fewer than `n` words is looked for as a whole.
    """
    wanted: dict[tuple[str, ...], list[int]] = {}
    asked = list(dict.fromkeys(questions))
    grams = [_word_grams(words_of(question), n) for question in asked]
    for index, own in enumerate(grams):
        for gram in own:
            wanted.setdefault(gram, []).append(index)
    lengths = {len(gram) for gram in wanted}
    found: dict[int, dict[tuple[str, ...], str]] = {}
    for name, text in texts:
        words = words_of(text)
        for length in lengths:
            for start in range(len(words) - length + 1):
                gram = tuple(words[start : start + length])
                for index in wanted.get(gram, ()):
                    found.setdefault(index, {}).setdefault(gram, name)
    overlaps = [
        Overlap(asked[index], len(hits) / len(grams[index]), sorted(set(hits.values())))
        for index, hits in found.items()
    ]
    return sorted(overlaps, key=lambda overlap: -overlap.share)


def _word_grams(words: list[str], n: int) -> set[tuple[str, ...]]:
    if not words:
        return set()
    return {tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, 1))}


def questions_of(benchmark: Path) -> list[str]:
    """Every user turn of a benchmark's JSONL file."""
    return [turn for turns in load_prompts(str(benchmark)) for turn in turns]


class NearDuplicates:
    """Questions seen so far, found again by MinHash over their runs of three words.

    Two questions count as the same when an estimated 60 % of those runs are shared. 64 hashes in
    16 bands of 4 make it likely that such a pair meets in one band.
    """

    HASHES, BANDS, SIMILAR, SHINGLE = 64, 16, 0.6, 3

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self._scale = draw.integers(1, 2**32, self.HASHES, dtype=np.uint64) | np.uint64(1)
        self._shift = draw.integers(0, 2**32, self.HASHES, dtype=np.uint64)
        self._signatures: list[np.ndarray] = []
        self._bands: dict[bytes, list[int]] = {}

    def add(self, text: str) -> bool:
        """Remember `text`; False when something much like it is there already."""
        signature = self._signature(text)
        keys = [
            bytes([band]) + part.tobytes()
            for band, part in enumerate(np.split(signature, self.BANDS))
        ]
        for other in {other for key in keys for other in self._bands.get(key, ())}:
            if (self._signatures[other] == signature).mean() >= self.SIMILAR:
                return False
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(signature)
        return True

    def _signature(self, text: str) -> np.ndarray:
        words = words_of(text)
        grams = {
            " ".join(words[i : i + self.SHINGLE])
            for i in range(max(len(words) - self.SHINGLE + 1, 1))
        }
        hashed = np.array([_hash32(gram) for gram in grams], dtype=np.uint64)
        mixed = (hashed[:, None] * self._scale + self._shift) >> np.uint64(32)
        return mixed.min(0)


def _hash32(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())
