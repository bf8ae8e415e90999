"""Oracle: the length that acceptance would have allowed, by looking at the answer first."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from specdec.draft import DraftStep, RoundOutcome
from specdec.errors import SpecdecError
from specdec.params import Params as ParamsBase
from specdec.policies.base import LengthPolicy


class OraclePolicy(LengthPolicy):
    """Go on behind tokens that the answer has, stop behind the first one that it has not.

    The upper limit of what a length policy can reach with a drafter. It knows the answer because
    the benchmark has written it before: `follow` takes it. Every round so ends with the first token
    that the target rejects, which no policy can avoid without knowing what it has not drafted yet.
    On a tree only the branch of the answer is extended.

    Where a text leaves the answer (low precision settles near-ties differently) drafts go on to
    `max_length`.

    For analysis only: `specdec bench` measures with it, everything else refuses it.
    """

    summary = "analysis only: the length that acceptance would have allowed"
    source = "an upper limit, not a method"
    analysis_only = True

    class Params(ParamsBase):
        max_length: int = Field(20, ge=1, description="never more than this many drafted tokens")

    answers: list[list[int]] | None = None

    def follow(self, answers: list[list[int]]) -> None:
        """Give the new tokens that each row of the next generation will write.

        Where a row's are not known (none are given), drafts go on to `max_length`.
        """
        self.answers = answers

    def start(self, batch_size: int) -> None:
        if self.answers is None:
            raise SpecdecError(
                "policy: oracle looks at the answer before it drafts; only 'specdec bench' can."
            )
        # The first token of a text comes with the prompt and belongs to no round.
        self.written = [1] * batch_size
        self.astray = [not answer for answer in self.answers]

    def keep_drafting(self, step: DraftStep) -> Tensor | bool:
        if step.depth >= self.params.max_length:
            return False
        # Only the branch of the answer is extended: what is drafted now hangs from it.
        expected = torch.tensor([self._expected(row, step.depth) for row in step.rows])
        astray = torch.tensor([self.astray[row] for row in step.rows])
        expected, astray = expected.to(step.tokens.device), astray.to(step.tokens.device)
        return (step.tokens == expected[:, None]) | astray[:, None]

    def observe(self, outcome: RoundOutcome) -> None:
        assert self.answers is not None
        for row, tokens in zip(outcome.rows, outcome.tokens, strict=True):
            start = self.written[row]
            self.written[row] += len(tokens)
            if self.answers[row][start : self.written[row]] != tokens:
                self.astray[row] = True

    def _expected(self, row: int, depth: int) -> int:
        """The answer's token at this depth; -1, which no token equals, behind its end."""
        assert self.answers is not None
        place = self.written[row] + depth - 1
        return self.answers[row][place] if place < len(self.answers[row]) else -1
