"""How good a drafter is on questions it has not seen: α by position, τ, c, and what they promise.

Every conversation is asked in full, one question at a time. Answers that loop are left out: any
drafter is right about a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from specdec.bench.questions import Question, column_order
from specdec.bench.summary import is_looping
from specdec.decoder import SpeculativeDecoder
from specdec.diagnosis import Diagnosis
from specdec.errors import SpecdecError
from specdec.metrics import RoundRecord, Statistics
from specdec.text import encode

PLAIN_TOKENS = 17
"""Written plainly behind each question, to time the target's pass over one token."""


@dataclass(frozen=True)
class Answer:
    """One answer: the rounds that wrote it, and seconds of plain target passes at its question."""

    category: str
    rounds: list[RoundRecord]
    plain: list[float]
    looping: bool


@dataclass(frozen=True)
class Score:
    """What a drafter reached over some answers.

    Attributes:
        answers, tokens: how many there were, and the tokens that their rounds committed.
        tau, alpha, draft_length: tokens committed in a round; share of drafted tokens accepted where
            the target judged them; drafted tokens (levels, on a tree) of a round.
        alpha_by_position: share of the rounds that drafted so far in which that position was
            accepted; the conditional one counts only rounds in which everything before it was.
        c, check: time of a drafting step, and of the pass that checks a draft, over that of a target
            pass over one token; medians of each.
        predicted_speedup: what τ and c give, τ / (γ c + 1) (Leviathan et al. 2023, theorem 3.8, with
            the measured τ in the place of the one that equal and independent α would give).
        measured_speedup: what the same rounds took, next to plain passes, the prompt's aside.
    """

    answers: int
    tokens: int
    tau: float
    alpha: float
    alpha_by_position: list[float]
    conditional_alpha_by_position: list[float]
    draft_length: float
    c: float
    check: float
    predicted_speedup: float
    measured_speedup: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Score:
        """Over all rounds of the answers together."""
        rounds = [record for answer in answers for record in answer.rounds]
        tokens = sum(sum(record.committed) for record in rounds)
        statistics = Statistics.from_rounds(rounds, tokens)
        costs = _costs(statistics, rounds, [each for answer in answers for each in answer.plain])
        return cls(
            answers=len(answers),
            tokens=tokens,
            tau=costs.tau,
            alpha=costs.alpha,
            alpha_by_position=statistics.alpha_by_position,
            conditional_alpha_by_position=statistics.conditional_alpha_by_position,
            draft_length=costs.length,
            c=costs.c,
            check=costs.check,
            predicted_speedup=costs.predicted,
            measured_speedup=costs.measured,
        )


@dataclass(frozen=True)
class Evaluation:
    """The score over all answers and over those of each category, and how many looped."""

    overall: Score
    by_category: dict[str, Score]
    looping: int

    def as_object(self) -> dict[str, Any]:
        """What `--json` prints: the overall score's fields, `looping` and `by_category`."""
        categories = {name: _rounded(score) for name, score in self.by_category.items()}
        return {**_rounded(self.overall), "looping": self.looping, "by_category": categories}


def evaluate(
    decoder: SpeculativeDecoder,
    questions: Iterable[Question],
    report: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Answer the questions with the decoder's drafter, policy and settings.

    Args:
        report: called with the number of questions that have been answered.

    Raises:
        SpecdecError: the decoder has no drafter, or every answer loops or ends at once.
    """
    if decoder.drafter is None:
        raise SpecdecError("drafter: there is none to evaluate; name one.")
    plain = SpeculativeDecoder(decoder.target, settings=decoder.settings, seed=decoder.seed)
    for each in (plain, decoder):  # warm-up: the first passes are slower
        each.generate([encode(decoder.tokenizer, [_says("user", "Hello")], None)], max_new_tokens=8)
    answers: list[Answer] = []
    for done, question in enumerate(questions, 1):
        answers += _converse(decoder, plain, question)
        report(done)
    calm = [answer for answer in answers if answer.rounds and not answer.looping]
    looping = sum(answer.looping for answer in answers)
    if not calm:
        raise SpecdecError(
            f"nothing to measure: of {len(answers)} answers {looping} repeat themselves and the "
            "others end with their first token. Ask other questions, or set a temperature."
        )
    names = column_order(answer.category for answer in calm)
    by_category = {
        name: Score.of([answer for answer in calm if answer.category == name]) for name in names
    }
    return Evaluation(Score.of(calm), by_category, looping)


def take(questions: Iterable[Question], limit: int | None) -> list[Question]:
    """The first `limit` questions of each category, those of MT-Bench taken as one."""
    taken: list[Question] = []
    counts: dict[str, int] = {}
    for question in questions:
        counts[question.column] = counts.get(question.column, 0) + 1
        if limit is None or counts[question.column] <= limit:
            taken.append(question)
    return taken


def _costs(
    statistics: Statistics, rounds: Sequence[RoundRecord], plain: Sequence[float]
) -> Diagnosis:
    """What a round takes, from medians: other work on the machine slows some rounds down a lot."""
    steps = [record.draft_seconds / max(1, record.draft_length[0]) for record in rounds]
    others = [each.seconds - each.draft_seconds - each.verify_seconds for each in rounds]
    return Diagnosis(
        alpha=statistics.alpha,
        tau=statistics.tau,
        length=statistics.mean_draft_length,
        draft=median(steps) * statistics.mean_draft_length,
        verify=median(record.verify_seconds for record in rounds),
        other=median(others),
        plain=median(plain),
    )


def _converse(
    decoder: SpeculativeDecoder, plain: SpeculativeDecoder, question: Question
) -> list[Answer]:
    """The answers to all turns of a question, each behind the conversation so far."""
    talk: list[dict[str, str]] = []
    answers = []
    for turn in question.turns:
        talk.append(_says("user", turn))
        prompt = _within_context(encode(decoder.tokenizer, talk, None), decoder)
        alone = plain.generate([prompt], max_new_tokens=PLAIN_TOKENS, eos_token_id=[])
        output = decoder.generate([prompt])
        talk.append(_says("assistant", output.text))
        answers.append(
            Answer(
                question.column,
                output.rounds,
                [record.verify_seconds for record in alone.rounds],
                is_looping(output.token_ids[0]),
            )
        )
    return answers


def _within_context(ids: list[int], decoder: SpeculativeDecoder) -> list[int]:
    """The end of a conversation that is too long for the target's context."""
    longest = decoder.target.max_positions
    return ids if longest is None else ids[-max(1, longest - decoder.settings.max_new_tokens) :]


def _says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _rounded(score: Score) -> dict[str, Any]:
    def shorter(value: Any) -> Any:
        return [shorter(each) for each in value] if isinstance(value, list) else round(value, 4)

    return {name: shorter(value) for name, value in asdict(score).items()}
