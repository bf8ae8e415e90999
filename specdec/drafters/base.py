"""The contract of a drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from specdec.draft import DraftStep, DraftTree, RoundOutcome
from specdec.params import Configurable

if TYPE_CHECKING:
    from specdec.drafters.vocab import DraftVocabulary
    from specdec.state import GenerationState
    from specdec.target import Target, TargetPass


class Drafter(Configurable):
    """Proposes tokens, level by level.

    Life of a drafter: built from its parameters; `attach(target)` once, where it loads what it needs
    and refuses a target that it does not fit; then for every generation a shallow copy
    (`copy.copy`) works: `start`, `prefill` for each piece of the prompt, and rounds of `begin`,
    `step`, `extend`, ..., `finish`, `commit`. What `start` puts on the drafter belongs to that
    generation alone; what `attach` puts there is shared and must not change.

    Subclasses declare their parameters as a nested `Params`, and give `summary` and `source`.
    """

    summary: str = ""
    source: str = ""
    needs_features: bool = False
    """Whether `prefill` and `commit` get the target's features (the output layer's input)."""
    max_positions: int | None = None
    """Longest text that the drafter can read, in tokens; beyond it nothing is drafted."""
    vocabulary: DraftVocabulary
    """Which ids the distributions of its steps are over, where it has distributions."""

    @property
    def proposes_chain(self) -> bool:
        """Whether its drafts are chains of tokens that come from distributions: `cape` widens those."""
        return False

    def attach(self, target: Target) -> None:
        """Load what is needed for `target`, and check that the two fit.

        Raises:
            SpecdecError: another tokenizer, sizes that do not fit, a checkpoint that is missing or
                of another kind.
        """

    def start(self, state: GenerationState) -> None:
        """Make the buffers of one generation. Called once, before the prompt is read."""

    def prefill(self, state: GenerationState, done: TargetPass) -> None:
        """The target has read a piece of the prompt: `done.starts`, `done.counts`, `done.features`.

        Row b's piece is positions `starts[b]` to `starts[b] + counts[b] - 1` of `state.ids`.
        """

    def begin(self, state: GenerationState) -> None:
        """A new round: draft behind the last committed token of each row (the root).

        Not called in rounds in which no row has room for a draft (all of `state.limits` are 0).
        """
        raise NotImplementedError

    def step(self) -> DraftStep | None:
        """The frontier: the newest level of the draft. None: there is nothing to propose at all."""
        raise NotImplementedError

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        """Draft one level behind the branches that go on.

        Args:
            go_on: for each row and branch of the last step, on the host; or True for all. At least
                one branch goes on. Answers for rows and branches that had ended count for nothing.

        Returns:
            False when nothing was extended and the draft is complete.
        """
        raise NotImplementedError

    def finish(self) -> DraftTree:
        """All that was drafted in this round."""
        raise NotImplementedError

    def commit(self, state: GenerationState, outcome: RoundOutcome, checked: TargetPass) -> None:
        """The round is over: `state` holds the new tokens, `checked` the target's pass over the tree.

        Node numbers in `outcome` are those of this drafter's own tree. A wrapper may have added
        nodes behind them (`cape` does), so an accepted token need not be one that was drafted here:
        go by `outcome.path_nodes`.
        """

    def rewind(self, lengths: list[int]) -> None:
        """Forget everything from position `lengths[b]` on (a conversation went another way)."""

    def keep_rows(self, rows: list[int]) -> None:
        """Only these rows of the current batch stay, in this order; the others have finished."""
