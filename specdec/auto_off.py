"""Turning drafting off for rows in which it does not pay, and trying again later."""

from __future__ import annotations

from collections import deque

from specdec.metrics import RoundRecord

LONGEST_PAUSE = 16
"""A pause is never longer than this many times the rounds of a trial."""
KEPT_PLAIN_ROUNDS = 32


class AutoOff:
    """Decides, row by row, whether the next round drafts.

    A row's drafts have paid when its last `rounds` drafting rounds committed more tokens than plain
    decoding would have in the same time. If they have not, the row decodes plainly for `rounds`
    rounds, then drafts again on trial; every further trial that fails doubles the pause.

    What a plain round takes is measured where rounds were plain; before that a drafting round
    without its drafting stands for it, which favours drafting. Decisions depend on measured times
    and past rounds alone, so they change no distribution; but a sampled text is repeatable by its
    seed only as far as they are.

    Args:
        rounds: of a trial.
        rows: of the batch that the generation starts with.
    """

    def __init__(self, rounds: int, rows: int) -> None:
        self.rounds = rounds
        self.plain: deque[float] = deque(maxlen=KEPT_PLAIN_ROUNDS)
        self.trials: list[deque[float]] = [deque(maxlen=rounds) for _ in range(rows)]
        self.pauses = [0] * rows
        self.failures = [0] * rows

    def drafts(self, row: int) -> bool:
        """Whether the row, by its index in the original batch, drafts in the next round."""
        return self.pauses[row] == 0

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round."""
        if not any(record.drafted):
            self.plain.append(record.seconds)
        plain = sum(self.plain) / len(self.plain) if self.plain else 0.0
        # No round is cheaper than a plain one, though a machine's hiccups may say so.
        cost = max(1.0, record.seconds / (plain or record.seconds - record.draft_seconds))
        for place, row in enumerate(record.rows):
            if self.pauses[row]:
                self.pauses[row] -= 1
            elif record.drafted[place] and not record.cut[place]:
                self._judge(row, record.committed[place] - cost)

    def _judge(self, row: int, gain: float) -> None:
        """`gain`: tokens that the round gave beyond what plain decoding gives in its time."""
        trial = self.trials[row]
        trial.append(gain)
        if len(trial) < self.rounds:
            return
        if sum(trial) > 0:
            self.failures[row] = 0
            return
        self.pauses[row] = self.rounds * min(2 ** self.failures[row], LONGEST_PAUSE)
        self.failures[row] += 1
        trial.clear()
