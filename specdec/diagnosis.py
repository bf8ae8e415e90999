"""Does drafting pay? The arithmetic of the speed-up, and a plain sentence on what holds it back.

In units of one target pass over one token, a round that drafts γ tokens (levels, on a tree) costs
`γ·c + v`: c is the cost ratio of a drafting step, v that of the pass that checks the draft (1 in
the papers). It gives `(1 - α^(γ+1)) / (1 - α)` tokens when each drafted token is accepted with
probability α.

Source: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.metrics import Statistics

NOTICEABLE_CHECK = 1.15
NOTICEABLE_OTHER = 0.10


def expected_tokens(alpha: float, length: float) -> float:
    """Tokens of a round that drafts `length` tokens, each accepted with probability `alpha`."""
    if alpha >= 1:
        return length + 1
    return (1 - alpha ** (length + 1)) / (1 - alpha)


def predicted_speedup(tokens: float, length: float, c: float, check: float = 1.0) -> float:
    """Speed-up over plain decoding that counts and costs alone would give.

    Args:
        tokens: committed in a round: `expected_tokens`, or a measured τ.
        length: drafted tokens of a round (levels, on a tree).
        c: time of one drafting step over time of one target pass.
        check: time of the pass that checks the draft over time of a pass over one token.
    """
    return tokens / (length * c + check)


def break_even_alpha(length: float, c: float, check: float = 1.0) -> float | None:
    """The α above which drafting `length` tokens pays; None where even α = 1 does not."""
    if predicted_speedup(length + 1, length, c, check) <= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if predicted_speedup(expected_tokens(middle, length), length, c, check) < 1:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Diagnosis:
    """What a round gives and costs, next to plain decoding; times in seconds, per row and round.

    Attributes:
        alpha, tau, length: acceptance, tokens of a round, drafted tokens (levels, on a tree).
        draft, verify, other: time of drafting, of the target's pass, and of everything else.
        plain: time of the target's pass over one token.
        speedup: measured over plain decoding; by default what τ and the times say.
    """

    alpha: float
    tau: float
    length: float
    draft: float
    verify: float
    other: float
    plain: float
    speedup: float | None = None

    @classmethod
    def of(
        cls, statistics: Statistics, plain: float | None = None, speedup: float | None = None
    ) -> Diagnosis:
        """From a generation's statistics.

        Args:
            plain: seconds of a target pass over one token. By default that of the pass that checks
                a draft stands for it: it is no shorter, so what is slow by it is slow.
        """
        rounds = max(1, statistics.rounds)
        verify = statistics.verify_s / rounds
        return cls(
            alpha=statistics.alpha,
            tau=statistics.tau,
            length=statistics.mean_draft_length,
            draft=statistics.draft_s / rounds,
            verify=verify,
            other=statistics.other_s / rounds,
            plain=verify if plain is None else plain,
            speedup=speedup,
        )

    @property
    def round(self) -> float:
        """Seconds of a whole round."""
        return self.draft + self.verify + self.other

    @property
    def c(self) -> float:
        """The cost ratio of a drafting step."""
        return self.draft / self.length / self.plain if self.length and self.plain else 0.0

    @property
    def check(self) -> float:
        """The cost ratio of the pass that checks the draft."""
        return self.verify / self.plain if self.plain else 1.0

    @property
    def predicted(self) -> float:
        """The speed-up that τ and c would give if nothing else took time."""
        return predicted_speedup(self.tau, self.length, self.c)

    @property
    def measured(self) -> float:
        if self.speedup is not None:
            return self.speedup
        return self.tau * self.plain / self.round if self.round else 0.0

    @property
    def slow(self) -> bool:
        """Whether drafting made it slower than plain decoding."""
        return self.length > 0 and self.round > 0 and self.measured < 1

    def sentence(self) -> str:
        """In plain words: how fast, and what takes the rest."""
        if not self.length or not self.round:
            return "nothing was drafted"
        if not self.slow:
            return (
                f"{self.measured:.2f} times as fast as plain decoding; τ {self.tau:.2f} at "
                f"c = {self.c:.2f} predicts {self.predicted:.2f}"
            )
        reasons = self._reasons() or [
            f"a round gives {self.tau:.2f} tokens and takes {self.round / self.plain:.2f} times a "
            "target pass"
        ]
        return f"slower than plain decoding: {'; '.join(reasons)}"

    def _reasons(self) -> list[str]:
        reasons = []
        needed = break_even_alpha(self.length, self.c)
        if needed is None:
            reasons.append(
                f"a drafting step costs c = {self.c:.2f} target passes, too much for any α"
            )
        elif self.alpha < needed:
            reasons.append(
                f"α {self.alpha:.2f} is below the break-even {needed:.2f} at c = {self.c:.2f}"
            )
        if self.check >= NOTICEABLE_CHECK:
            reasons.append(f"checking a draft costs {self.check:.2f} target passes")
        share = self.other / self.round
        if share >= NOTICEABLE_OTHER:
            reasons.append(f"{share:.0%} of the time is outside the models")
        return reasons
