"""Round records, and what is derived from them: α by position, τ, times.

Definitions, used everywhere:

- *drafted*: draft tokens that the target checked (all nodes of a tree).
- *accepted*: draft tokens that were committed.
- *tried*: draft tokens whose whole path before them had been accepted, so that the target's verdict
  on them counts; on a tree one for each level that the walk reached.
- α = accepted / tried: the chance that a drafted token is accepted (Leviathan et al. 2023, E[β]).
- τ = (accepted + bonus tokens) / rounds: tokens committed in a round. Every row of a batch counts
  its own rounds. The first token of a text comes from the prompt's pass and belongs to no round.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from specdec.diagnosis import Diagnosis
from specdec.draft import RoundOutcome

ROUNDS_TO_JUDGE = 8
"""With fewer rounds nothing is said about whether drafting pays."""


@dataclass
class RoundRecord:
    """One round, as kept in `GenerationOutput.rounds` and handed to `specdec_round_finished`.

    Lists have an entry for each row that took part; `rows` says which rows of the original batch
    they are. Times are seconds of the whole round, all rows together.
    """

    index: int
    rows: list[int]
    drafted: list[int]
    draft_length: list[int]
    accepted: list[int]
    committed: list[int]
    cut: list[bool]
    draft_seconds: float
    verify_seconds: float
    seconds: float
    tokens: list[list[int]]
    tree: dict[str, Any] | None = None

    @classmethod
    def of(cls, index: int, outcome: RoundOutcome, seconds: float) -> RoundRecord:
        return cls(
            index=index,
            rows=outcome.rows,
            drafted=outcome.drafted,
            draft_length=outcome.draft_length,
            accepted=outcome.accepted,
            committed=[len(tokens) for tokens in outcome.tokens],
            cut=outcome.cut,
            draft_seconds=outcome.draft_seconds,
            verify_seconds=outcome.verify_seconds,
            seconds=seconds,
            tokens=outcome.tokens,
        )


@dataclass
class Statistics:
    """Counts and times of a generation, or of one of its rows (which has counts only)."""

    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tau: float = 0.0
    alpha: float = 0.0
    alpha_by_position: list[float] = None  # type: ignore[assignment]
    conditional_alpha_by_position: list[float] = None  # type: ignore[assignment]
    mean_draft_length: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    wall_s: float = 0.0
    tokens_per_s: float = 0.0
    diagnosis: str | None = None

    @classmethod
    def from_rounds(
        cls,
        records: Iterable[RoundRecord],
        new_tokens: int,
        prefill_s: float = 0.0,
        wall_s: float = 0.0,
    ) -> Statistics:
        """Derive everything from the records, all rows together.

        `alpha_by_position[i]` is the share of rounds that drafted position i in which it was
        accepted; the conditional one counts only rounds in which everything before it was.
        `diagnosis` is a sentence where drafting made the whole slower than plain decoding.
        """
        records = list(records)
        counted = _Counts()
        for record in records:
            for place in range(len(record.rows)):
                counted.add(record, place)
        statistics = cls._counted(counted, new_tokens)
        statistics.prefill_s = prefill_s
        statistics.draft_s = draft_s = sum(record.draft_seconds for record in records)
        statistics.verify_s = verify_s = sum(record.verify_seconds for record in records)
        statistics.other_s = max(0.0, wall_s - prefill_s - draft_s - verify_s)
        statistics.wall_s = wall_s
        statistics.tokens_per_s = _ratio(new_tokens, wall_s)
        if wall_s and counted.rounds >= ROUNDS_TO_JUDGE:
            statistics.diagnosis = _diagnosis(statistics, records)
        return statistics

    @classmethod
    def of_rows(cls, records: Iterable[RoundRecord], new_tokens: list[int]) -> list[Statistics]:
        """The counts of each row of the original batch, which has `new_tokens[row]`."""
        counted = [_Counts() for _ in new_tokens]
        for record in records:
            for place, row in enumerate(record.rows):
                counted[row].add(record, place)
        return [cls._counted(*pair) for pair in zip(counted, new_tokens, strict=True)]

    @classmethod
    def _counted(cls, counted: _Counts, new_tokens: int) -> Statistics:
        return cls(
            new_tokens=new_tokens,
            rounds=counted.rounds,
            drafted=counted.drafted,
            accepted=counted.accepted,
            tau=_ratio(counted.committed, counted.rounds),
            alpha=_ratio(counted.accepted, counted.tried),
            alpha_by_position=counted.by_position(counted.reached),
            conditional_alpha_by_position=counted.by_position(counted.tried_at),
            mean_draft_length=_ratio(counted.length, counted.rounds),
        )


def _diagnosis(statistics: Statistics, records: list[RoundRecord]) -> str | None:
    plain = [record for record in records if not any(record.drafted)]
    rows = sum(len(record.rows) for record in plain)
    seconds = sum(record.verify_seconds for record in plain)
    diagnosis = Diagnosis.of(statistics, seconds / rows if rows >= ROUNDS_TO_JUDGE else None)
    return diagnosis.sentence() if diagnosis.slow else None


class _Counts:
    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = self.committed = self.tried = self.length = 0
        self.reached: list[int] = []
        self.accepted_at: list[int] = []
        self.tried_at: list[int] = []

    def add(self, record: RoundRecord, place: int) -> None:
        length, accepted = record.draft_length[place], record.accepted[place]
        # A text that ended inside the draft judged nothing behind its end.
        ended = record.committed[place] == accepted
        tried = accepted if ended else min(length, accepted + 1)
        self.rounds += 1
        self.drafted += record.drafted[place]
        self.length += length
        self.accepted += accepted
        self.committed += record.committed[place]
        self.tried += tried
        judged = tried if ended else length
        for counts, upto in (
            (self.reached, judged),
            (self.accepted_at, accepted),
            (self.tried_at, tried),
        ):
            counts.extend([0] * (upto - len(counts)))
            for position in range(upto):
                counts[position] += 1

    def by_position(self, among: list[int]) -> list[float]:
        accepted = self.accepted_at + [0] * (len(among) - len(self.accepted_at))
        return [_ratio(hit, total) for hit, total in zip(accepted, among, strict=False)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class Clock:
    """Points in time on a device, without synchronising it.

    On CUDA a point is an event in the stream: read the time between two points only after something
    has waited for the device anyway (the end of a round does).
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds."""
        return start.elapsed_time(end) / 1000 if self.cuda else end - start
