"""What a benchmark times: one answer by our own loop, with a drafter, without one, or by the oracle."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.decoder import SpeculativeDecoder
from specdec.draft import DraftStep, DraftTree, RoundOutcome
from specdec.generation import GenerationSettings
from specdec.loop import Generation, Request
from specdec.metrics import RoundRecord
from specdec.policies.base import LengthPolicy
from specdec.policies.oracle import OraclePolicy

ORACLE_TRIES = 3
"""So often the oracle follows its own new text until the text is the one it followed."""
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass
class Answer:
    """One turn, answered for each row of a batch; times in seconds, for all rows together.

    Attributes:
        token_ids: the new tokens of each row, without padding.
        prefill_s: until the first tokens; `decode_s` the rest.
        marks: after every step, `(tokens of all rows so far, seconds since the start)`.
        rounds: for each row `[draft length, accepted, committed, drafted nodes]` a round; the first
            token comes with the prompt and belongs to none. None is what a peer does not tell.
        draft_s, verify_s: of all rounds; 0 where a peer does not say.
        entropy: `[entropy, accepted]` of the drafted tokens that the target judged, where the policy
            looks at entropy (chains of one row).
        memory_mb: the most memory in use beyond what was loaded before; None if unknown.
    """

    token_ids: list[list[int]]
    prefill_s: float
    decode_s: float
    marks: list[tuple[int, float]]
    rounds: list[list[list[int | None]]]
    draft_s: float = 0.0
    verify_s: float = 0.0
    entropy: list[list[float]] = field(default_factory=list)
    memory_mb: float | None = None


class Method(Protocol):
    """A way to answer."""

    def answer(
        self, prompts: list[list[int]], seed: int, reference: list[list[int]] | None = None
    ) -> Answer:
        """Answer a batch of prompts, timed.

        Args:
            prompts: token ids of each row.
            seed: of sampling.
            reference: what the baseline wrote behind the same prompts, where that is known.
        """
        ...


class OwnMethod:
    """Our own loop with a drafter, or without one."""

    def __init__(self, decoder: SpeculativeDecoder, settings: GenerationSettings) -> None:
        self.decoder, self.settings = decoder, settings

    def answer(
        self, prompts: list[list[int]], seed: int, reference: list[list[int]] | None = None
    ) -> Answer:
        watched = Watched(self.decoder.policy)

        def begin() -> Generation:
            return Generation(
                self.decoder.target, self.decoder.drafter, watched, self.request(prompts, seed)
            )

        return timed(begin, self.decoder.target.device)

    def request(self, prompts: list[list[int]], seed: int, keep_trees: bool = False) -> Request:
        settings = self.settings.model_dump()
        if self.settings.temperature == 0:
            # They stand in the grid for its other temperatures.
            settings |= {"top_k": None, "top_p": None, "min_p": None}
        return self.decoder.request(prompts, seed=seed, keep_trees=keep_trees, **settings)


class OracleMethod(OwnMethod):
    """Our own loop with the oracle, which follows the answer that is written in the end.

    Greedily that is the baseline's answer; where low precision settles a tie in another way, it is
    written once more with the oracle following the new text. Sampling, a first pass that is not
    timed drafts as far as it may, and the timed pass draws the same random numbers: those of a
    round depend on the round alone, so the two write the same text.
    """

    def answer(
        self, prompts: list[list[int]], seed: int, reference: list[list[int]] | None = None
    ) -> Answer:
        greedy = self.settings.temperature == 0
        text = reference if greedy and reference is not None else [[] for _ in prompts]
        for _ in range(ORACLE_TRIES):
            answer = self._follow(text, prompts, seed)
            if answer.token_ids == text:
                break
            text = answer.token_ids
        return answer

    def _follow(self, text: list[list[int]], prompts: list[list[int]], seed: int) -> Answer:
        policy = copy.copy(self.decoder.policy)
        assert isinstance(policy, OraclePolicy)
        policy.follow(text)
        decoder = self.decoder

        def begin() -> Generation:
            return RepeatableRounds(
                decoder.target, decoder.drafter, policy, self.request(prompts, seed)
            )

        return timed(begin, decoder.target.device)


class RepeatableRounds(Generation):
    """Random numbers that depend on the seed, the round, and whether it drafts or verifies: how many
    were drawn before does not matter. So a draft that is cut shorter leaves the verdict as it was."""

    def _draft(self) -> tuple[DraftTree, list[bool]]:
        self._reseed("draft")
        drafted = super()._draft()
        self._reseed("verify")
        return drafted

    def _reseed(self, part: str) -> None:
        key = f"{self.request.seed} {len(self.records)} {part}"
        self.state.sampler.reseed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))


class Watched(LengthPolicy):
    """A policy, and the entropies it looked at: they are there, so keeping them costs no time."""

    def __init__(self, policy: LengthPolicy) -> None:
        super().__init__()
        self.policy = policy

    def start(self, batch_size: int) -> None:
        self.policy = copy.copy(self.policy)
        self.policy.start(batch_size)
        self.kept: list[list[Tensor]] = []
        self.current: list[Tensor] = []

    def keep_drafting(self, step: DraftStep) -> Tensor | bool:
        answer = self.policy.keep_drafting(step)
        if "entropy" in vars(step):  # the cached property: it has been computed
            self.current.append(step.entropy)
        return answer

    def observe(self, outcome: RoundOutcome) -> None:
        self.kept.append(self.current)
        self.current = []
        self.policy.observe(outcome)

    def judged(self, records: Sequence[RoundRecord]) -> list[list[float]]:
        """`[entropy, accepted]` of each drafted token that the target judged, for one row."""
        pairs = []
        for record, entropies in zip(records, self.kept, strict=True):
            accepted, length = record.accepted[0], record.draft_length[0]
            ended = record.committed[0] == accepted
            tried = accepted if ended else min(length, accepted + 1)
            if any(entropy.numel() != 1 for entropy in entropies):
                continue  # a tree, or a batch: which token was judged is another matter
            for place, entropy in enumerate(entropies[:tried]):
                pairs.append([round(float(entropy), 4), int(place < accepted)])
        return pairs


def timed(begin: Any, device: torch.device) -> Answer:
    """Run the generation that `begin` makes, setting it up included."""
    with peak_memory(device) as memory:
        started = now(device)
        generation: Generation = begin()
        rows = len(generation.texts)
        marks: list[tuple[int, float]] = []
        tokens = 0
        for committed in generation.run():
            tokens += sum(len(new) for _, new in committed)
            marks.append((tokens, now(device) - started))
        ended = now(device)
    records = generation.records
    watched = generation.policy
    prefill = marks[0][1] if marks else 0.0
    return Answer(
        token_ids=[
            text[length:]
            for text, length in zip(generation.texts, generation.prompt_lengths, strict=True)
        ],
        prefill_s=prefill,
        decode_s=ended - started - prefill,
        marks=marks,
        rounds=[_rounds_of(records, row) for row in range(rows)],
        draft_s=sum(record.draft_seconds for record in records),
        verify_s=sum(record.verify_seconds for record in records),
        entropy=watched.judged(records) if isinstance(watched, Watched) and rows == 1 else [],
        memory_mb=memory.megabytes,
    )


def _rounds_of(records: Sequence[RoundRecord], row: int) -> list[list[int | None]]:
    rounds: list[list[int | None]] = []
    for record in records:
        if row in record.rows:
            place = record.rows.index(row)
            parts = (record.draft_length, record.accepted, record.committed, record.drafted)
            rounds.append([part[place] for part in parts])
    return rounds


def now(device: torch.device) -> float:
    """A point in time, in seconds, after all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- memory ---------------------------------------------------------------------------------------


@dataclass
class Memory:
    megabytes: float | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Memory]:
    """The most memory in use inside the block beyond that in use before it.

    On CUDA what torch has allocated; elsewhere the process's resident memory, which Linux tells.
    """
    memory = Memory()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield memory
        memory.megabytes = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        return
    before_kb = _reset_peak()
    yield memory
    if before_kb is not None:
        memory.megabytes = max(0, _status("VmHWM") - before_kb) / 1024


def _reset_peak() -> int | None:
    """Resident memory in kB, the peak set back to it; None where the system does not say."""
    try:
        # What an earlier answer freed would otherwise hide what this one takes.
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text("5")
        return _status("VmRSS")
    except (OSError, AttributeError):
        return None


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{STATUS} has no {name}")


# --- answers to look at ---------------------------------------------------------------------------


def drafts_of(method: OwnMethod, prompt: list[int], seed: int) -> list[dict[str, Any]]:
    """The rounds of an answer with what was drafted: token ids `accepted`, `rejected`, `bonus`.

    Not timed. On a tree `rejected` is the most probable path behind the accepted tokens, and `others`
    counts the rest.
    """
    decoder = method.decoder
    request = method.request([prompt], seed, keep_trees=True)
    generation = Generation(decoder.target, decoder.drafter, decoder.policy, request)
    (_, first), *_ = [committed[0] for committed in generation.run()]
    rounds: list[dict[str, Any]] = [{"accepted": [], "rejected": [], "others": 0, "bonus": first}]
    for record in generation.records:
        assert record.tree is not None
        accepted = record.accepted[0]
        rejected = _rejected_path(record.tree)
        drafted = sum(record.tree["valid"][0])
        rounds.append(
            {
                "accepted": record.tokens[0][:accepted],
                "rejected": rejected,
                "others": drafted - accepted - len(rejected),
                "bonus": record.tokens[0][accepted:],
            }
        )
    return rounds


def _rejected_path(tree: dict[str, Any]) -> list[int]:
    """The first child behind the accepted path, its first child, and so on."""
    tokens, parents, valid = (tree[key][0] for key in ("tokens", "parents", "valid"))
    node = tree["accepted"][0][-1] if tree["accepted"][0] else -1
    path: list[int] = []
    while True:
        children = [
            child
            for child, parent in enumerate(parents)
            if parent == node and valid[child] and child not in tree["accepted"][0]
        ]
        if not children:
            return path
        node = children[0]
        path.append(tokens[node])
