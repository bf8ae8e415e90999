"""From results to figures: speed-ups with intervals, acceptance, times, and texts compared.

A speed is tokens over seconds, prefill included, as in the papers. A row's speed-up on a question
is its speed over the baseline's on the same question at the same temperature and batch size. A
category's mean is over questions, that of `all` over the categories; medians are over questions,
with a bootstrap interval.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec.bench.config import PLAIN, BenchConfig, Row
from specdec.bench.questions import Question, column_order
from specdec.diagnosis import Diagnosis
from specdec.draft import RoundOutcome
from specdec.generation import eos_ids, make_processors
from specdec.metrics import RoundRecord, Statistics
from specdec.target import Target
from specdec.training.pool import DISTINCT_SHARE, distinct_share

ALL = "all"
RESAMPLES = 2000
TIE_STEPS = 4
"""Two logits are a tie when they are within so many steps of the dtype at their size."""
TIE_FLOOR = 1e-4

Line = dict[str, Any]


def is_looping(tokens: list[int]) -> bool:
    """Whether an answer repeats itself: less than 70 % of its 8-grams are distinct."""
    return distinct_share(tokens) < DISTINCT_SHARE


def summarise(
    results: list[Line], config: BenchConfig, differences: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of `summary.json`: one for each row of the grid and category, and `all`."""
    table = Table(results, config)
    differing = defaultdict(list)
    for difference in differences:
        differing[difference["row"]].append(difference)
    summary = []
    for row in config.rows:
        lines = table.of(row)
        columns = column_order(line["column"] for line in lines)
        for column in [*columns, ALL]:
            chosen = [line for line in lines if column in (ALL, line["column"])]
            if chosen:
                summary.append(_entry(row, column, chosen, table, differing[row.name]))
    return summary


@dataclass
class Table:
    """Results by row and question, with what each is compared with."""

    results: list[Line]
    config: BenchConfig
    by_key: dict[tuple[str, str], Line] = field(init=False)

    def __post_init__(self) -> None:
        # A unit that was cut short by a kill has been asked again: the later line counts.
        self.by_key = {(line["row"], line["question"]): line for line in self.results}

    def of(self, row: Row) -> list[Line]:
        """The row's results, in the order of the questions."""
        keys = [(row.name, question.id) for question in self.config.questions]
        return [self.by_key[key] for key in keys if key in self.by_key]

    def counterpart(self, line: Line, method: str) -> Line | None:
        """What `method` did with the same question in the same setting."""
        setting = (line["temperature"], line["batch_size"])
        for row in self.config.rows:
            if row.method == method and row.setting == setting:
                return self.by_key.get((row.name, line["question"]))
        return None

    def baseline(self, line: Line) -> Line | None:
        return self.counterpart(line, self.config.settings.baseline)

    def plain(self, line: Line) -> Line | None:
        return self.counterpart(line, PLAIN)

    def looping(self, line: Line) -> bool:
        """Whether the answer, or the one it is compared with, repeats itself."""
        baseline = self.baseline(line)
        return line["looping"] or (baseline is not None and baseline["looping"])


# --- one entry ------------------------------------------------------------------------------------


def _entry(
    row: Row, column: str, lines: list[Line], table: Table, differences: list[dict[str, Any]]
) -> dict[str, Any]:
    plain_pass = _plain_pass(row, column, table)
    statistics = statistics_of(lines)
    over_plain = mean_over_columns(ratios_of(lines, table.plain, decode_speed))
    drafts = row.peer is None and row.method != PLAIN
    diagnosis = Diagnosis.of(statistics, plain_pass, over_plain) if drafts and plain_pass else None
    greedy = row.temperature == 0
    compared = [line for line in lines if table.baseline(line) is not None]
    asked = {line["question"] for line in compared}
    differences = [each for each in differences if each["question"] in asked]
    differing = {each["question"] for each in differences}
    calm = [line for line in lines if not table.looping(line)]
    memory = [line["memory_mb"] for line in lines if line["memory_mb"] is not None]
    return {
        "name": row.name,
        "category": column,
        "method": row.method,
        "temperature": row.temperature,
        "batch_size": row.batch_size,
        "questions": len(lines),
        **_speedup(lines, table),
        "speedup_decode_mean": mean_over_columns(ratios_of(lines, table.baseline, decode_speed)),
        "tau": statistics.tau,
        "alpha": statistics.alpha if drafts else None,
        "tokens_per_s": _total_speed(lines),
        "equal_to_baseline": not differing if greedy else None,
        "equal_share": 1 - len(differing) / len(compared) if greedy and compared else None,
        "only_ties": all(d["tie"] for d in differences) if greedy else None,
        "loop_share": sum(line["looping"] for line in lines) / len(lines),
        "without_loops": {
            "questions": len(calm),
            **_speedup(calm, table),
            "tokens_per_s": _total_speed(calm),
            "tau": statistics_of(calm).tau,
        },
        "alpha_by_position": statistics.alpha_by_position if drafts else [],
        "conditional_alpha_by_position": (
            statistics.conditional_alpha_by_position if drafts else []
        ),
        "mean_draft_length": statistics.mean_draft_length if drafts else None,
        "draft_lengths": _lengths(lines) if drafts else {},
        "round_ms": _round_ms(statistics) if row.peer is None else None,
        "c": diagnosis.c if diagnosis else None,
        "check": diagnosis.check if diagnosis else None,
        "speedup_over_plain": over_plain,
        "predicted_speedup": diagnosis.predicted if diagnosis else None,
        "diagnosis": diagnosis.sentence() if diagnosis and diagnosis.slow else None,
        "prefill_s": _mean(line["prefill_s"] for line in lines),
        "memory_mb": max(memory) if memory else None,
    }


def _speedup(lines: list[Line], table: Table) -> dict[str, Any]:
    """How the lines compare with the baseline's: whole answers, and their beginnings."""
    lengths = table.config.settings.lengths or []
    by_length = {str(length): _compared(lines, table, speed_to(length)) for length in lengths}
    return {**_compared(lines, table, speed), "speedup_by_length": by_length}


def _compared(
    lines: list[Line], table: Table, of: Callable[[Line], float | None]
) -> dict[str, Any]:
    """Mean, median and interval of the ratios to the baseline."""
    ratios = ratios_of(lines, table.baseline, of)
    every = [ratio for some in ratios.values() for ratio in some]
    return {
        "speedup_mean": mean_over_columns(ratios),
        "speedup_median": float(np.median(every)) if every else None,
        "speedup_ci95": median_interval(every) if every else None,
    }


def ratios_of(
    lines: list[Line],
    counterpart: Callable[[Line], Line | None],
    of: Callable[[Line], float | None],
) -> dict[str, list[float]]:
    """For each column, `of` the line over `of` its counterpart, question by question (batch by
    batch)."""
    ratios = defaultdict(list)
    units = set()
    for line in lines:
        other = counterpart(line)
        above, below = of(line), None if other is None else of(other)
        # Rows of a batch were timed together: their one ratio is one observation.
        if above and below and line["unit"] not in units:
            units.add(line["unit"])
            ratios[line["column"]].append(above / below)
    return ratios


def speed(line: Line) -> float:
    """Tokens a second, prefill included."""
    return line["unit_tokens"] / (line["prefill_s"] + line["decode_s"])


def speed_to(length: int) -> Callable[[Line], float | None]:
    """Tokens a second of an answer's first `length` tokens; None for an answer that is shorter."""

    def of(line: Line) -> float | None:
        seconds = line["length_s"].get(str(length))
        return length / seconds if seconds else None

    return of


def decode_speed(line: Line) -> float | None:
    """Tokens a second behind the first ones; None for an answer that has no more."""
    tokens = line["unit_tokens"] - line["first_tokens"]
    return tokens / line["decode_s"] if tokens > 0 and line["decode_s"] > 0 else None


def mean_over_columns(ratios: dict[str, list[float]]) -> float | None:
    """Every category counts the same, as in the papers' tables."""
    means = [float(np.mean(some)) for some in ratios.values() if some]
    return float(np.mean(means)) if means else None


def median_interval(ratios: Sequence[float]) -> list[float]:
    """Bootstrap 95 % interval of the median over questions."""
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(np.asarray(ratios), (RESAMPLES, len(ratios))), axis=1)
    return [float(bound) for bound in np.percentile(medians, [2.5, 97.5])]


def _total_speed(lines: list[Line]) -> float | None:
    seconds = sum((line["prefill_s"] + line["decode_s"]) / line["unit_size"] for line in lines)
    tokens = sum(line["unit_tokens"] / line["unit_size"] for line in lines)
    return tokens / seconds if seconds else None


# --- rounds ---------------------------------------------------------------------------------------


def statistics_of(lines: Sequence[Line]) -> Statistics:
    """The counts and times of all rounds of `lines`, as for one generation."""
    records = [
        record
        for line in lines
        for turn in line["turns"]
        for record in map(_record, turn["rounds"])
    ]
    share = [1 / line["unit_size"] for line in lines]

    def total(key: str) -> float:
        return sum(part * line[key] for part, line in zip(share, lines, strict=True))

    statistics = Statistics.from_rounds(records, sum(line["tokens"] for line in lines))
    statistics.draft_s, statistics.verify_s = total("draft_s"), total("verify_s")
    statistics.prefill_s = total("prefill_s")
    statistics.other_s = max(0.0, total("decode_s") - statistics.draft_s - statistics.verify_s)
    statistics.wall_s = statistics.prefill_s + total("decode_s")
    return statistics


def _record(counts: list[int | None]) -> RoundRecord:
    """What was kept of a round; what a peer did not tell counts as nothing drafted."""
    length, accepted, committed, drafted = (count or 0 for count in counts)
    if counts[0] is None:
        accepted = 0
    outcome = RoundOutcome(
        rows=[0], tokens=[[0] * committed], accepted=[accepted], drafted=[drafted],
        draft_length=[length], cut=[False], path=torch.empty(0), path_nodes=[],
    )  # fmt: skip
    return RoundRecord.of(0, outcome, 0.0)


def _lengths(lines: list[Line]) -> dict[str, int]:
    """How many rounds drafted so many tokens."""
    counts = Counter(r[0] for line in lines for turn in line["turns"] for r in turn["rounds"])
    return {str(length): counts[length] for length in sorted(counts)}


def _plain_pass(row: Row, column: str, table: Table) -> float | None:
    """Seconds of a target pass over one token, in the row's setting and on the same questions."""
    for other in table.config.rows:
        if other.method == PLAIN and other.setting == row.setting:
            lines = table.of(other)
            if column != ALL:
                lines = [line for line in lines if line["column"] == column]
            plain = statistics_of(lines)
            return plain.verify_s / plain.rounds if plain.rounds else None
    return None


def _round_ms(statistics: Statistics) -> dict[str, float]:
    rounds = max(1, statistics.rounds)
    parts = {
        "draft": statistics.draft_s, "verify": statistics.verify_s, "other": statistics.other_s,
    }  # fmt: skip
    return {name: 1000 * seconds / rounds for name, seconds in parts.items()}


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


# --- texts ----------------------------------------------------------------------------------------


def find_differences(
    results: list[Line],
    config: BenchConfig,
    target: Target,
    encode_talk: Callable[[list[dict[str, str]]], list[int]],
) -> list[dict[str, Any]]:
    """Where greedy texts leave the baseline's: the first token, and how close the two logits are.

    Turns behind the first that differs are not compared: their conversation is another one.
    """
    table = Table(results, config)
    questions = {question.id: question for question in config.questions}
    found = []
    for row in config.rows:
        if row.temperature > 0:
            continue
        for line in table.of(row):
            baseline = table.baseline(line)
            if baseline is None or baseline is line:
                continue
            place = _first_difference(line, baseline)
            if place is not None:
                turn, position = place
                prompt = _prompt(questions[line["question"]], line, turn, target, encode_talk)
                found.append(
                    {
                        "row": row.name,
                        "question": line["question"],
                        "turn": turn,
                        "position": position,
                        **_closeness(target, config, prompt, line, baseline, turn, position),
                    }
                )
    return found


def _first_difference(line: Line, baseline: Line) -> tuple[int, int] | None:
    for turn, (ours, theirs) in enumerate(zip(line["turns"], baseline["turns"], strict=True)):
        mine, other = ours["token_ids"], theirs["token_ids"]
        if mine != other:
            same = [a == b for a, b in zip(mine, other, strict=False)]
            return turn, same.index(False) if False in same else len(same)
    return None


def _prompt(
    question: Question,
    line: Line,
    turn: int,
    target: Target,
    encode_talk: Callable[[list[dict[str, str]]], list[int]],
) -> list[int]:
    talk = []
    for place in range(turn + 1):
        talk.append({"role": "user", "content": question.turns[place]})
        if place < turn:
            tokens = line["turns"][place]["token_ids"]
            text = target.tokenizer.decode(tokens, skip_special_tokens=True)
            talk.append({"role": "assistant", "content": text})
    return encode_talk(talk)


@torch.no_grad()
def _closeness(
    target: Target,
    config: BenchConfig,
    prompt: list[int],
    line: Line,
    baseline: Line,
    turn: int,
    position: int,
) -> dict[str, Any]:
    """The two tokens' scores (processed logits) behind what both texts have in common."""
    mine, other = line["turns"][turn]["token_ids"], baseline["turns"][turn]["token_ids"]
    if position >= min(len(mine), len(other)):
        return {"gap": None, "tie": False}  # one of them goes on where the other has ended
    ids = torch.tensor([prompt + mine[:position]], device=target.device)
    logits = target.model(ids, use_cache=False).logits[:, -1].float()
    settings = config.generation.model_copy(update={"temperature": 0.0})
    scores = make_processors(settings, [], target.device)(ids, logits)[0]  # type: ignore[arg-type]
    if position < settings.min_new_tokens:
        scores[eos_ids(settings.eos_token_id, target.default_eos)] = -torch.inf
    top = float(scores.max())
    pair = [float(scores[tokens[position]]) for tokens in (mine, other)]
    step = torch.finfo(target.dtype).eps * abs(top)
    bound = max(TIE_STEPS * step, TIE_FLOOR * max(1.0, abs(top)))
    return {"gap": abs(pair[0] - pair[1]), "tie": top - min(pair) <= bound}
