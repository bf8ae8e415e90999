"""Asks every question of every row, in random order, and keeps what came."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specdec.bench.config import BenchConfig, Row
from specdec.bench.methods import Answer, Method, OracleMethod, OwnMethod, drafts_of
from specdec.bench.peers import PEERS
from specdec.bench.questions import Question
from specdec.bench.store import RunFolder, folder_fingerprint
from specdec.bench.summary import find_differences, is_looping, summarise
from specdec.config import TargetConfig, read
from specdec.decoder import SpeculativeDecoder
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.base import Drafter
from specdec.errors import SpecdecError
from specdec.plugins import make_drafter, make_policy, resolve_model
from specdec.target import Target, load_pretrained
from specdec.text import encode

WARM_UP_TOKENS = 8
LONGEST_WAIT = timedelta(days=30)
"""For the other processes of `accelerate launch`: questions differ in length, so they wait."""


@dataclass(frozen=True)
class Progress:
    """How far a run is: results of this process, and what it is about to do."""

    done: int
    total: int
    seconds_left: float | None
    doing: str


@dataclass(frozen=True)
class Unit:
    """Questions that are asked together: one, or a batch from one category."""

    batch_size: int
    questions: tuple[Question, ...]

    @property
    def key(self) -> str:
        return f"{self.batch_size}:{self.questions[0].id}"


class BenchRun:
    """A benchmark on a machine.

    Args:
        config: checked and expanded.
        out: the run folder; by default `runs/NAME-HASH`, so that another configuration gets another.
        report: called as the run goes on.

    Raises:
        SpecdecError: a model that cannot be loaded, or a folder that holds another run.
    """

    def __init__(
        self,
        config: BenchConfig,
        out: Path | None = None,
        report: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.config = config
        self.process, self.processes, self.wait = _processes()
        self.report = report if self.process == 0 else lambda progress: None
        self.methods, self.target, weights = _build(config)
        if self.target.tokenizer is None:
            raise SpecdecError("target.model: it has no tokenizer, and questions need one.")
        path = out or Path("runs") / f"{config.name}-{config.hash}"
        self.folder = RunFolder(path, config.record(), weights)

    def run(self) -> list[dict[str, Any]]:
        """Measure what is missing; returns the rows of `summary.json`."""
        if self.process == 0:
            self.folder.claim()
        self.wait()
        self.written = {
            (line["row"], line["question"]): [turn["token_ids"] for turn in line["turns"]]
            for line in self.folder.results()
        }
        done = set(self.written)
        units = list(self._units())[self.process :: self.processes]
        left = [unit for unit in units if self._missing(unit, done)]
        if left:
            self._warm_up()
        clock = _Clock(self, left, done)
        for unit in left:
            self._ask(unit, self._missing(unit, done), clock)
        self.wait()
        summary: list[dict[str, Any]] = []
        if self.process == 0:
            summary = self._finish()
        self.wait()
        return summary

    def _units(self) -> Iterator[Unit]:
        for size in sorted({row.batch_size for row in self.config.rows}):
            by_category: dict[str, list[Question]] = defaultdict(list)
            for question in self.config.questions:
                by_category[question.category].append(question)
                if len(by_category[question.category]) == size:
                    yield Unit(size, tuple(by_category.pop(question.category)))
            for rest in by_category.values():
                yield Unit(size, tuple(rest))

    def _missing(self, unit: Unit, done: set[tuple[str, str]]) -> list[Row]:
        """The rows that have not answered all of the unit's questions yet."""
        return [
            row
            for row in self.config.rows
            if row.batch_size == unit.batch_size
            and not all((row.name, question.id) in done for question in unit.questions)
        ]

    def _warm_up(self) -> None:
        """Every method answers once, so that none pays for what happens only the first time."""
        prompt = encode(self.target.tokenizer, [{"role": "user", "content": "Hello"}], None)
        for row in self.config.rows:
            self.report(Progress(0, 1, None, f"warm-up: {row.name}"))
            method = copy.copy(self.methods[row.name])
            method.settings = method.settings.model_copy(update={"max_new_tokens": WARM_UP_TOKENS})
            method.answer([prompt] * row.batch_size, 0)

    def _ask(self, unit: Unit, rows: list[Row], clock: _Clock) -> None:
        for row in self._order(unit, rows):
            clock.start(row)
            lines = self._converse(unit, row)
            self.folder.append(lines)
            for line in lines:
                key = (line["row"], line["question"])
                self.written[key] = [turn["token_ids"] for turn in line["turns"]]
            clock.end(row)

    def _order(self, unit: Unit, rows: list[Row]) -> list[Row]:
        """Random, but the oracle, which follows the baseline's answer, comes behind it."""
        draw = random.Random(f"{self.config.settings.seed} {unit.key}")
        order = sorted(rows, key=lambda row: row.name)
        draw.shuffle(order)
        for place, row in enumerate(order):
            later = [
                index
                for index, other in enumerate(order)
                if index > place
                and row.is_oracle
                and other.setting == row.setting
                and other.method == self.config.settings.baseline
            ]
            if later:
                order[place], order[later[0]] = order[later[0]], order[place]
        return order

    def _converse(self, unit: Unit, row: Row) -> list[dict[str, Any]]:
        """One row answers the unit's questions, turn by turn, each in its own conversation."""
        method = self.methods[row.name]
        talks: list[list[dict[str, str]]] = [[] for _ in unit.questions]
        turns: list[list[dict[str, Any]]] = [[] for _ in unit.questions]
        answers = []
        for turn in range(max(len(question.turns) for question in unit.questions)):
            asked = [place for place, q in enumerate(unit.questions) if turn < len(q.turns)]
            prompts = []
            for place in asked:
                message = {"role": "user", "content": unit.questions[place].turns[turn]}
                talks[place].append(message)
                prompts.append(self._prompt(talks[place]))
            seed = _seed(self.config.settings.seed, unit.key, turn)
            reference = self._reference(row, unit, asked, turn) if row.is_oracle else None
            answer = method.answer(prompts, seed, reference)
            answers.append(answer)
            for index, place in enumerate(asked):
                tokens = answer.token_ids[index]
                text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
                talks[place].append({"role": "assistant", "content": text})
                turns[place].append(
                    {
                        "prompt_tokens": len(prompts[index]),
                        "token_ids": tokens,
                        "rounds": answer.rounds[index],
                    }
                )
        return [
            self._line(unit, row, question, turns[place], answers)
            for place, question in enumerate(unit.questions)
        ]

    def _prompt(self, talk: list[dict[str, str]]) -> list[int]:
        """The conversation's token ids, its beginning cut off where the context is too short."""
        ids = encode(self.target.tokenizer, talk, None)
        context = self.target.max_positions
        room = len(ids) if context is None else context - self.config.generation.max_new_tokens
        if room < 1:
            raise SpecdecError(
                f"generation.max_new_tokens: {self.config.generation.max_new_tokens} tokens leave "
                f"no room for a question in the target's context of {context} tokens."
            )
        return ids[-room:]

    def _reference(
        self, row: Row, unit: Unit, asked: list[int], turn: int
    ) -> list[list[int]] | None:
        """What the baseline wrote in this turn, where it has answered already."""
        baseline = next(
            other
            for other in self.config.rows
            if other.method == self.config.settings.baseline and other.setting == row.setting
        )
        keys = [(baseline.name, unit.questions[place].id) for place in asked]
        if not all(key in self.written for key in keys):
            return None
        return [self.written[key][turn] for key in keys]

    def _line(
        self,
        unit: Unit,
        row: Row,
        question: Question,
        turns: list[dict[str, Any]],
        answers: list[Answer],
    ) -> dict[str, Any]:
        """A line of `results.jsonl`; times and `unit_tokens` are of the whole unit."""
        prefill = sum(answer.prefill_s for answer in answers)
        decode = sum(answer.decode_s for answer in answers)
        memory = [answer.memory_mb for answer in answers if answer.memory_mb is not None]
        line = {
            "row": row.name,
            "method": row.method,
            "temperature": row.temperature,
            "batch_size": row.batch_size,
            "question": question.id,
            "category": question.category,
            "column": question.column,
            "unit": unit.key,
            "unit_size": len(unit.questions),
            "unit_tokens": sum(sum(map(len, answer.token_ids)) for answer in answers),
            "first_tokens": sum(answer.marks[0][0] for answer in answers),
            "tokens": sum(len(turn["token_ids"]) for turn in turns),
            "prefill_s": prefill,
            "decode_s": decode,
            "draft_s": sum(answer.draft_s for answer in answers),
            "verify_s": sum(answer.verify_s for answer in answers),
            "memory_mb": round(max(memory), 1) if memory else None,
            "looping": any(is_looping(turn["token_ids"]) for turn in turns),
            "turns": turns,
            "entropy": [pair for answer in answers for pair in answer.entropy],
        }
        if self.config.settings.lengths:
            line["length_s"] = _seconds_at(self.config.settings.lengths, answers[0])
        return line

    # --- at the end -------------------------------------------------------------------------------

    def _finish(self) -> list[dict[str, Any]]:
        results = self.folder.results()
        self.report(Progress(1, 1, 0, "comparing texts"))
        differences = find_differences(results, self.config, self.target, self._prompt)
        self.folder.write("differences.json", differences)
        summary = summarise(results, self.config, differences)
        if not (self.folder.path / "examples.json").exists():
            self.folder.write("examples.json", self._examples(results))
        self.folder.write("summary.json", summary)
        return summary

    def _examples(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """One question answered again by every row that drafts, with the drafts kept."""
        coldest = min(row.temperature for row in self.config.rows)
        rows = [
            row
            for row in self.config.rows
            if row.temperature == coldest
            and row.batch_size == min(each.batch_size for each in self.config.rows)
            and row.drafter is not None
            and self.methods[row.name].decoder.drafter is not None
            and not row.is_oracle
        ]
        looping = {line["question"] for line in results if line["looping"]}
        question = next(
            (q for q in self.config.questions if q.id not in looping), self.config.questions[0]
        )
        prompt = self._prompt([{"role": "user", "content": question.turns[0]}])
        seed = _seed(self.config.settings.seed, question.id, 0)
        shown = {}
        for row in rows:
            self.report(Progress(1, 1, 0, f"an answer to look at: {row.name}"))
            method = self.methods[row.name]
            assert isinstance(method, OwnMethod)
            shown[row.name] = [self._as_text(each) for each in drafts_of(method, prompt, seed)]
        return {"question": question.turns[0], "category": question.category, "rows": shown}

    def _as_text(self, drafts: dict[str, Any]) -> dict[str, Any]:
        decode = self.target.tokenizer.decode
        return {
            key: value if isinstance(value, int) else [decode([token]) for token in value]
            for key, value in drafts.items()
        }


class _Clock:
    """Time left, from what each row's answers have taken so far."""

    def __init__(self, run: BenchRun, left: list[Unit], done: set[tuple[str, str]]) -> None:
        self.report = run.report
        self.waiting: list[str] = [row.name for unit in left for row in run._missing(unit, done)]
        self.total = len(self.waiting)
        self.took: dict[str, list[float]] = defaultdict(list)

    def start(self, row: Row) -> None:
        self.started = time.monotonic()
        done = self.total - len(self.waiting)
        self.report(Progress(done, self.total, self._left(), row.name))

    def end(self, row: Row) -> None:
        self.took[row.name].append(time.monotonic() - self.started)
        self.waiting.remove(row.name)

    def _left(self) -> float | None:
        every = [seconds for took in self.took.values() for seconds in took]
        if not every:
            return None
        mean = sum(every) / len(every)
        by_row = {name: sum(took) / len(took) for name, took in self.took.items()}
        return sum(by_row.get(name, mean) for name in self.waiting)


def _seconds_at(lengths: list[int], answer: Answer) -> dict[str, float]:
    """Seconds until the first so many tokens were there, for the lengths that were reached."""
    seconds = {}
    for length in lengths:
        before = (0, 0.0)
        for mark in answer.marks:
            if mark[0] >= length:
                share = (length - before[0]) / (mark[0] - before[0])
                seconds[str(length)] = before[1] + share * (mark[1] - before[1])
                break
            before = mark
    return seconds


def _seed(*parts: Any) -> int:
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _processes() -> tuple[int, int, Callable[[], None]]:
    """This process's number, how many there are, and how to wait for the others."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, lambda: None
    from accelerate import PartialState

    state = PartialState(timeout=LONGEST_WAIT)
    return state.process_index, state.num_processes, state.wait_for_everyone


# --- building what is measured --------------------------------------------------------------------


def _build(config: BenchConfig) -> tuple[dict[str, Any], Target, str]:
    """The method of every row, sharing one target and one instance of each drafter."""
    target = config.target
    if isinstance(target, TargetConfig):
        target = read({"target": target.model_dump()}).load_target()
    decoders: dict[str, SpeculativeDecoder] = {}
    methods: dict[str, Any] = {}
    with config.places.named():
        for row in config.rows:
            if row.peer is None:
                methods[row.name] = _own(row, config, target, decoders)
        for row in config.rows:
            if row.peer is not None:
                methods[row.name] = _peer(row, config, target, decoders)
    return methods, target, _weights(config)


def _own(
    row: Row, config: BenchConfig, target: Target, decoders: dict[str, SpeculativeDecoder]
) -> OwnMethod:
    key = json.dumps(row.drafter, sort_keys=True, default=repr)
    if key not in decoders:
        decoders[key] = SpeculativeDecoder(target, make_drafter(copy.deepcopy(row.drafter)))
    decoder = copy.copy(decoders[key])
    decoder.set_policy(make_policy(row.policy, analysis=True))
    settings = config.generation.model_copy(update={"temperature": row.temperature})
    return (OracleMethod if row.is_oracle else OwnMethod)(decoder, settings)


def _peer(
    row: Row, config: BenchConfig, target: Target, decoders: dict[str, SpeculativeDecoder]
) -> Method:
    assert row.peer is not None
    cls = PEERS[row.peer["name"]]
    params: Any = cls.Params(**{key: value for key, value in row.peer.items() if key != "name"})
    model = None
    if cls.needs_model:
        model = _loaded_model(params.model, [decoder.drafter for decoder in decoders.values()])
        if model is None:
            model, _ = load_pretrained(
                params.model, role="peers.model", dtype=target.dtype, device=str(target.device)
            )
            model.eval()
    settings = config.generation.model_copy(update={"temperature": row.temperature})
    return cls(target, settings, params, model)


def _loaded_model(name: Any, drafters: list[Drafter | None]) -> PreTrainedModel | None:
    """The model that one of our own drafters has loaded: peers get the very same."""
    if isinstance(name, PreTrainedModel):
        return name
    for drafter in drafters:
        drafter = getattr(drafter, "base", drafter)
        if isinstance(drafter, AutoregressiveDrafter) and drafter.params.model == name:
            return drafter.model.model
    return None


def _weights(config: BenchConfig) -> str:
    """A fingerprint of every checkpoint that is a folder on this machine."""
    names = {getattr(config.target, "model", None)}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("model", "checkpoint") and isinstance(inner, str):
                    names.add(inner)
                collect(inner)

    for row in config.rows:
        collect(row.drafter)
        collect(row.peer)
    digest = hashlib.sha256()
    for name in sorted(name for name in names if name):
        folder = Path(resolve_model(name))
        digest.update(folder_fingerprint(folder).encode() if folder.is_dir() else name.encode())
    return digest.hexdigest()[:12]
