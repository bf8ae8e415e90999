"""What drafters that add to another drafter's tree share."""

from __future__ import annotations

import copy
from typing import Any, Literal

from pydantic import Field

from specdec.draft import DraftStep, DraftTree, RoundOutcome
from specdec.drafters.base import Drafter
from specdec.params import Params as ParamsBase
from specdec.plugins import make_drafter
from specdec.state import GenerationState
from specdec.target import Target, TargetPass


class Expansion(Drafter):
    """Adds nodes to the draft of another drafter, its base, which works as if it were alone.

    The base's nodes keep their numbers: what is added stands behind them. Subclasses add in
    `finish`, and refuse a base that they cannot add to in `check_base`.
    """

    class Params(ParamsBase):
        base: Any = Field(description="the drafter to add to: a name, or `name` and parameters")

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.base = self.check_base(make_drafter(self.params.base, "drafter.base"))

    def check_base(self, base: Drafter | None) -> Drafter:
        """The base, if nodes can be added to its drafts.

        Raises:
            SpecdecError: there is none (plain decoding), or it is of a kind that does not fit.
        """
        raise NotImplementedError

    def attach(self, target: Target) -> None:
        self.base = copy.copy(self.base)
        self.base.attach(target)
        self.needs_features = self.base.needs_features
        self.max_positions = self.base.max_positions

    def start(self, state: GenerationState) -> None:
        self.base = copy.copy(self.base)
        self.base.start(state)

    def prefill(self, state: GenerationState, done: TargetPass) -> None:
        self.base.prefill(state, done)

    def begin(self, state: GenerationState) -> None:
        self.base.begin(state)

    def step(self) -> DraftStep | None:
        return self.base.step()

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        return self.base.extend(go_on)

    def finish(self) -> DraftTree:
        raise NotImplementedError

    def commit(self, state: GenerationState, outcome: RoundOutcome, checked: TargetPass) -> None:
        self.base.commit(state, outcome, checked)

    def rewind(self, lengths: list[int]) -> None:
        self.base.rewind(lengths)

    def keep_rows(self, rows: list[int]) -> None:
        self.base.keep_rows(rows)
