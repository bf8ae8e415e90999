"""The loop: prefill, then rounds of draft, verify, accept, commit until every row has ended."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specdec.auto_off import AutoOff
from specdec.draft import DraftStep, DraftTree, RoundOutcome
from specdec.drafters.base import Drafter
from specdec.generation import StopRules
from specdec.host import read, send
from specdec.metrics import Clock, RoundRecord
from specdec.policies.base import LengthPolicy
from specdec.sampling import Sampler, check_processors
from specdec.state import GenerationState
from specdec.target import Target, TargetPass, pieces
from specdec.verification import Verdict, verify

ROUNDS_BEFORE_WARNING = 50
TAU_OF_A_USELESS_DRAFTER = 1.05


@dataclass
class Request:
    """What one generation is asked for, in the loop's terms.

    Attributes:
        prompts: token ids of each row, at least one a row.
        processors, do_sample, seed: the sampling rule.
        stop: when a row ends.
        min_new_tokens: of each row, before which it may not end.
        keep_scores: keep the target's processed scores and raw logits of every new token.
        keep_trees: keep every round's draft tree in its record (for looking at).
        auto_off: rounds after which a row whose drafts have not paid stops drafting for a while.
        observers: called with every round's record.
    """

    prompts: list[list[int]]
    processors: LogitsProcessorList
    do_sample: bool
    stop: StopRules
    seed: int | None = None
    min_new_tokens: list[int] = field(default_factory=list)
    keep_scores: bool = False
    keep_trees: bool = False
    auto_off: int | None = None
    observers: Sequence[Callable[[RoundRecord], None]] = ()


class Generation:
    """One run of the loop: the rows of a batch, from their prompts to their ends.

    Works on shallow copies of the drafter and the policy, so nothing leaks into another generation.
    `previous` is a finished generation of one row, as this one has, whose caches are taken over: what
    its text and the new prompt have in common is not read again. It lends them once; without them
    the whole text is read.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: LengthPolicy,
        request: Request,
        previous: Generation | None = None,
    ) -> None:
        check_processors(request.processors, len(request.prompts))
        self.target, self.request, self.stop = target, request, request.stop
        self.prototype, self.policy = drafter, copy.copy(policy)
        self.clock = Clock(target.device)
        self.texts = [list(prompt) for prompt in request.prompts]
        self.prompt_lengths = [len(prompt) for prompt in request.prompts]
        self.finish_reasons: list[str | None] = [None] * len(self.texts)
        self.scores: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.texts]
        self.records: list[RoundRecord] = []
        self.prefill_seconds = 0.0
        self.lent = self.warned = False
        rounds = request.auto_off
        self.auto_off = None if rounds is None else AutoOff(rounds, len(self.texts))
        self.state = self._new_state()
        self.drafter = self._take_over(drafter, previous)
        self.policy.start(len(self.texts))

    @torch.no_grad()
    def run(self) -> Generator[list[tuple[int, list[int]]], None, None]:
        """Yields what was committed, after the prompt's pass and after every round: (row, tokens)."""
        self._check_budget()
        if self.state.rows:
            yield self._prefill()
        while self.state.rows:
            yield self._round()

    def _round(self) -> list[tuple[int, list[int]]]:
        state, clock = self.state, self.clock
        started, begun = time.perf_counter(), clock.now()
        self._set_limits()
        tree, cut = self._draft()
        drafted = clock.now()
        checked = self.target.verify(tree, state, self._features)
        verified = clock.now()
        verdict = verify(
            tree, checked.logits, state.sampler, state, keep_scores=self.request.keep_scores
        )
        outcome = self._settle(tree, verdict, cut)
        outcome.draft_seconds = clock.between(begun, drafted)
        outcome.verify_seconds = clock.between(drafted, verified)
        self._commit(outcome, checked)
        record = RoundRecord.of(len(self.records), outcome, time.perf_counter() - started)
        if self.request.keep_trees:
            record.tree = _tree_on_host(tree, outcome)
        self._record(record)
        committed = list(zip(outcome.rows, outcome.tokens, strict=True))
        self._drop_finished(outcome.finish_reasons)
        return committed

    # --- the parts of a round ---------------------------------------------------------------------

    def _draft(self) -> tuple[DraftTree, list[bool]]:
        """The round's tree, and for each row whether its draft was cut short by the end of the text."""
        rows = range(self.state.batch_size)
        cut = [False] * self.state.batch_size
        nothing = DraftTree.empty(self.state.batch_size, self.state.device)
        if self.drafter is None or not any(self.state.limits):
            return nothing, cut
        self.drafter.begin(self.state)
        step = self.drafter.step()
        if step is None:
            return nothing, cut
        drafting = [limit > 0 for limit in self.state.limits]
        while True:
            go_on, stopped = self._go_on(step)
            cut = [cut[row] or (drafting[row] and stopped[row]) for row in rows]
            if go_on is not True:
                drafting = [drafting[row] and any(go_on[row]) for row in rows]
            if not any(drafting) or not self.drafter.extend(go_on):
                return self.drafter.finish().to(self.state.device), cut
            following = self.drafter.step()
            assert following is not None, "a drafter that extended its draft has a frontier"
            step = following

    def _go_on(self, step: DraftStep) -> tuple[list[list[bool]] | Literal[True], list[bool]]:
        """Which branches are drafted further, and which rows only stop because the text must end."""
        asked, ended = self._read_branches(self.policy.keep_drafting(step), step)
        room = [step.depth < limit for limit in self.state.limits]
        go_on = [
            [want and not end and has_room for want, end in zip(*branches, strict=True)]
            for *branches, has_room in zip(asked, ended, room, strict=True)
        ]
        stopped = [any(want) and not any(go) for want, go in zip(asked, go_on, strict=True)]
        return True if all(map(all, go_on)) else go_on, stopped

    def _read_branches(
        self, wanted: Tensor | bool, step: DraftStep
    ) -> tuple[list[list[bool]], list[list[bool]]]:
        """The policy's answer, and which branches end with a drafted end of text, `[B, W]` each.

        An answer that is known on the host is taken as it is. One that depends on the draft has to
        be read, which on an accelerator is its price; looking for an end of text costs nothing more
        then, and without it drafts behind an end are only wasted.
        """
        if isinstance(wanted, bool):
            wanted = torch.tensor(wanted)
        wanted, tokens = wanted.expand(step.tokens.shape), step.tokens
        if wanted.device.type == "cpu" and tokens.device.type != "cpu":
            return wanted.tolist(), [[False] * tokens.shape[1]] * tokens.shape[0]
        eos = self.state.eos.to(tokens.device)
        ended = torch.isin(tokens, eos) if len(eos) else torch.zeros_like(tokens).bool()
        asked, ends = read(torch.stack([wanted.to(tokens.device), ended]))
        return asked, ends

    def _settle(self, tree: DraftTree, verdict: Verdict, cut: list[bool]) -> RoundOutcome:
        """Read what was accepted (the round's one host synchronisation) and apply the stop rules."""
        levels = verdict.tokens.shape[1]
        drafted = tree.valid.sum(1, keepdim=True)
        longest = (tree.depths[:, 1:] * tree.valid).amax(1, keepdim=True) if tree.size else drafted
        packed = torch.cat(
            [verdict.accepted[:, None], drafted, longest, verdict.tokens, verdict.path], dim=1
        )
        outcome = RoundOutcome(
            rows=list(self.state.rows),
            tokens=[], accepted=[], drafted=[], draft_length=[], cut=[], path=verdict.path,
            path_nodes=[], finish_reasons=[],
        )  # fmt: skip
        for place, values in enumerate(read(packed)):
            accepted, nodes, length = values[:3]
            tokens, reason = self._end(place, values[3 : 4 + accepted])
            outcome.tokens.append(tokens)
            outcome.accepted.append(min(accepted, len(tokens)))
            outcome.drafted.append(nodes)
            outcome.draft_length.append(length)
            outcome.path_nodes.append(values[3 + levels : 3 + levels + len(tokens)])
            outcome.finish_reasons.append(reason)
            outcome.cut.append(cut[place] or len(tokens) <= accepted)
            self._keep_scores(place, verdict.scores[: len(tokens)])
        return outcome

    def _commit(self, outcome: RoundOutcome, checked: TargetPass) -> None:
        self.target.commit(self.state, outcome)
        self.state.append(outcome.tokens)
        for row, tokens in zip(outcome.rows, outcome.tokens, strict=True):
            self.texts[row].extend(tokens)
        if self.drafter is not None:
            self.drafter.commit(self.state, outcome, checked)
        self.policy.observe(outcome)

    def _end(self, place: int, tokens: list[int]) -> tuple[list[int], str | None]:
        """The tokens that stay of those a row is about to commit, and why it ends with them."""
        row = self.state.rows[place]
        written = len(self.texts[row]) - self.prompt_lengths[row]
        prefix = self.state.ids[place, : self.state.lengths[place]]
        keep, reason = self.stop.cut(row, written, prefix, tokens)
        return tokens[:keep], reason

    def _drop_finished(self, reasons: list[str | None]) -> None:
        for row, reason in zip(self.state.rows, reasons, strict=True):
            self.finish_reasons[row] = reason
        stay = [place for place, reason in enumerate(reasons) if reason is None]
        if len(stay) == len(reasons):
            return
        if stay:
            self.state.keep_rows(stay)
            if self.drafter is not None:
                self.drafter.keep_rows(stay)
        else:
            # Everything has ended: the caches stay whole for a conversation that goes on.
            self.state.rows = []

    # --- before the first round -------------------------------------------------------------------

    def _prefill(self) -> list[tuple[int, list[int]]]:
        """Read the prompts and commit the first token of each row."""
        state = self.state
        started = time.perf_counter()
        logits: Tensor | None = None
        for starts, counts in pieces(state.cache.lengths, state.lengths):
            done = self.target.prefill(state, starts, counts, self._features)
            if self.drafter is not None:
                self.drafter.prefill(state, done)
            read_now = send(counts, done.logits.device)[:, None] > 0
            last = done.logits[:, 0]
            logits = last if logits is None else torch.where(read_now, last, logits)
        assert logits is not None
        nothing = torch.zeros(state.batch_size, 0, dtype=torch.long, device=state.device)
        scores = state.sampler.scores(logits, state, nothing)
        first = read(state.sampler.draw(scores)[0])
        ended = [self._end(place, [token]) for place, token in enumerate(first)]
        if self.request.keep_scores:
            for place in range(state.batch_size):
                self._keep_scores(place, [(scores, logits.float())])
        committed = []
        for row, (tokens, _) in zip(state.rows, ended, strict=True):
            self.texts[row].extend(tokens)
            committed.append((row, tokens))
        state.append([tokens for tokens, _ in ended])
        self.prefill_seconds = time.perf_counter() - started
        self._drop_finished([reason for _, reason in ended])
        return committed

    def _new_state(self) -> GenerationState:
        request = self.request
        floor = [
            length + least
            for length, least in zip(self.prompt_lengths, request.min_new_tokens, strict=False)
        ]
        sampler = Sampler(
            request.processors,
            request.do_sample,
            seed=request.seed,
            no_eos_before=floor if any(request.min_new_tokens) else None,
            eos=request.stop.eos,
        )
        cache = self.target.new_cache(len(request.prompts))
        return GenerationState(
            request.prompts, cache, sampler, request.stop.eos, self.target.device
        )

    def _take_over(self, drafter: Drafter | None, previous: Generation | None) -> Drafter | None:
        """A drafter of this generation's own; with the caches of `previous` as far as they fit."""
        if previous is None or not previous.lends(self.target, drafter):
            if drafter is None:
                return None
            drafter = copy.copy(drafter)
            drafter.start(self.state)
            return drafter
        previous.lent = True
        # One token that both have in common is read again: a drafter that pairs a position's feature
        # with the next token needs the feature where the texts part.
        shared = max(0, _common_prefix(previous.texts[0], self.texts[0]) - 1)
        shared = min(shared, previous.state.cache.lengths[0])
        self.state.cache = previous.state.cache
        self.state.cache.lengths = [shared]
        if previous.drafter is not None:
            previous.drafter.rewind([shared])
        return previous.drafter

    def lends(self, target: Target, drafter: Drafter | None) -> bool:
        """Whether the caches are still here, and are those of this target and this drafter."""
        return not self.lent and self.target is target and self.prototype is drafter

    def _check_budget(self) -> None:
        """End rows that may write nothing; warn about texts that the context will cut."""
        longest = self.target.max_positions
        for row, length in enumerate(self.prompt_lengths):
            room = self.stop.max_new_tokens[row]
            if longest is not None and length + room > longest:
                warnings.warn(
                    f"Prompt {row} has {length} tokens and asks for {room} more, but the target's "
                    f"context is {longest} tokens: the text ends there.",
                    stacklevel=2,
                )
                self.stop.max_new_tokens[row] = max(0, longest - length)
        if any(room == 0 for room in self.stop.max_new_tokens):
            self._drop_finished([None if room else "length" for room in self.stop.max_new_tokens])

    # --- housekeeping -----------------------------------------------------------------------------

    @property
    def _features(self) -> bool:
        return self.drafter is not None and self.drafter.needs_features

    def _set_limits(self) -> None:
        """How long a path of each row can be: budget and contexts leave no room for more."""
        drafter_context = None if self.drafter is None else self.drafter.max_positions
        for place, (row, length) in enumerate(
            zip(self.state.rows, self.state.lengths, strict=True)
        ):
            written = len(self.texts[row]) - self.prompt_lengths[row]
            # The target's context is in the budget already (`_check_budget`).
            limit = self.stop.max_new_tokens[row] - written - 1
            if drafter_context is not None and limit > drafter_context - length:
                limit = max(0, drafter_context - length)
                if limit == 0:
                    self._warn_short_context(drafter_context)
            if self.auto_off is not None and not self.auto_off.drafts(row):
                limit = 0
            self.state.limits[place] = limit

    def _warn_short_context(self, positions: int) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"The drafter's context ends at {positions} tokens: behind it the target decodes "
                "without a draft.",
                stacklevel=2,
            )

    def _record(self, record: RoundRecord) -> None:
        self.records.append(record)
        if self.auto_off is not None:
            self.auto_off.observe(record)
        for observer in self.request.observers:
            observer(record)
        if len(self.records) == ROUNDS_BEFORE_WARNING and any(
            sum(each.draft_length) for each in self.records
        ):
            committed = sum(sum(each.committed) for each in self.records)
            tau = committed / sum(len(each.rows) for each in self.records)
            if tau < TAU_OF_A_USELESS_DRAFTER:
                warnings.warn(
                    f"The drafter hardly helps: {tau:.2f} tokens per round over "
                    f"{ROUNDS_BEFORE_WARNING} rounds. Check that it was made for this target.",
                    stacklevel=2,
                )

    def _keep_scores(self, place: int, levels: list[tuple[Tensor, Tensor]]) -> None:
        kept = self.scores[self.state.rows[place]]
        kept.extend((scores[place], raw[place]) for scores, raw in levels)


def _common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def _tree_on_host(tree: DraftTree, outcome: RoundOutcome) -> dict[str, Any]:
    """The tree as lists, for showing it: tokens, parents, valid, and each row's accepted nodes."""
    return {
        "tokens": read(tree.tokens),
        "parents": read(tree.parents),
        "valid": read(tree.valid),
        "accepted": [
            [node - 1 for node in nodes[1 : 1 + accepted]]
            for nodes, accepted in zip(outcome.path_nodes, outcome.accepted, strict=True)
        ],
    }
