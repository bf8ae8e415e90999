"""The contract of a length policy."""

from __future__ import annotations

from torch import Tensor

from specdec.draft import DraftStep, RoundOutcome
from specdec.params import Configurable


class LengthPolicy(Configurable):
    """Decides, level by level, which branches of a draft go on.

    The decoder works on a copy of the policy for each generation (`copy.copy`, then `start`), so
    what a policy keeps on itself in `start` belongs to that generation alone. Whatever it keeps for
    a row is indexed by `step.rows` and `outcome.rows`: rows leave the batch when they finish.

    A policy is asked after tokens were drawn and only says whether drafting goes on behind them.
    The tokens stay in the draft, so no policy can bias the output. It must not look at the target's
    verdict on the round it decides about (it never sees it before `observe`).

    Subclasses declare their parameters as a nested `Params`, and give `summary` and `source`.
    """

    summary: str = ""
    source: str = ""
    analysis_only: bool = False
    """Whether it knows what no policy can know; only `specdec bench` works with such a one."""

    def start(self, batch_size: int) -> None:
        """Called once at the beginning of a generation of `batch_size` rows."""

    def keep_drafting(self, step: DraftStep) -> Tensor | bool:
        """Whether each branch is drafted further.

        Returns:
            A bool tensor `[B, W]`, or one plain bool for all branches: a decision that needs no
            tensor costs no synchronisation with the device.
        """
        raise NotImplementedError

    def observe(self, outcome: RoundOutcome) -> None:
        """Called after every round with what was drafted and accepted in each row."""
