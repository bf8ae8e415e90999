"""Training text from the target itself: it writes questions as its users would, and answers them.

Magpie (Xu et al. 2024, arXiv 2406.08464): a chat model that is given its own template up to the
user turn writes a user's question. A drafter learns to predict the target, so the answers are the
target's own as well, a share of them greedy and a share sampled.

A data folder holds `data.json` (the settings that made it), `shard-NNNNN.jsonl` (one object a
line: `id`, `category`, `turn`, `sampled`, `finish`, `question`, `prompt_ids`, `answer_ids`) and
`shard-NNNNN.stats.json` (what was made and dropped). Each shard depends only on the settings, its
number and the shards before it, and appears under its name at once when it is complete: a run
that was killed goes on with the shard it was in, and gives the rows it would have given.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import Field

from specdec.config import TargetConfig
from specdec.errors import SpecdecError
from specdec.params import Params
from specdec.target import Target
from specdec.training.files import (
    contents,
    differences,
    read_json,
    read_jsonl,
    read_stats,
    shards,
    stats_path,
    write_atomically,
)
from specdec.training.layers import check_output_layer
from specdec.training.openers import OPENERS, Opener
from specdec.training.overlap import NearDuplicates, words_of
from specdec.training.pool import DISTINCT_SHARE, NGRAM, GenerationPool, Job, distinct_share
from specdec.training.prompts import load_prompts

FORMAT = 1
QUESTION_TOP_P = 0.95
FOLLOW_UP_TOKENS = 100
SHORTEST_TRIMMED = 16
MOST_BARREN = 3
"""Shards in a row that may be empty before the target counts as unable to write questions."""


class DataConfig(Params):
    """What `specdec data` reads. All but `out` and `answer_tokens` decide the rows."""

    target: TargetConfig = Field(
        default_factory=lambda: TargetConfig.model_validate({}), description="the model that writes"
    )
    out: Path = Field(description="folder of the shards")
    answer_tokens: int = Field(1_000_000, ge=1, description="stop at this many tokens of answers")
    prompts: str | None = Field(
        None,
        description="a JSONL file, or a `datasets` name (NAME or NAME:SPLIT); by default the "
        "target writes the questions itself",
    )
    seed: int = Field(0, ge=0, description="seed of every draw")
    batch_size: int = Field(64, ge=1, description="texts generated together")
    shard_size: int = Field(512, ge=1, description="conversations in a shard")
    max_question: int = Field(200, ge=1, description="most tokens of a question")
    max_answer: int = Field(256, ge=1, description="most tokens of an answer")
    greedy_share: float = Field(
        0.5, ge=0, le=1, description="share decoded greedily; the rest is drawn at temperature 1"
    )
    opened_share: float = Field(
        0.5, ge=0, le=1, description="share of the own questions that begin with given words"
    )
    second_turn_share: float = Field(
        0.2, ge=0, le=1, description="share of the own conversations with a second question"
    )
    loops: Literal["drop", "trim"] = Field(
        "drop",
        description="an answer with less than 70 % distinct 8-grams is left out (drop), or kept up "
        "to where it begins to repeat itself (trim)",
    )

    def record(self) -> dict[str, Any]:
        """What decides the rows, as it stands in `data.json`."""
        decides = self.model_dump(mode="json", exclude={"target", "out", "answer_tokens"})
        target = {"model": self.target.model, "dtype": self.target.dtype}
        return {"format": FORMAT, "target": target, **decides}


@dataclass
class DataProgress:
    """How far a running synthesis is; `counts` are those of the shard in work."""

    shard: int
    answer_tokens: int
    goal: int
    tokens_per_s: float
    seconds_left: float
    counts: Counter[str]


class DataSynthesis:
    """Fills a data folder with shards until they hold `answer_tokens` tokens of answers.

    Raises:
        SpecdecError: the folder was made with other settings or is being filled by another
            process, the tokenizer has no chat template that questions could be written in, a
            prompt source is empty or unreadable, or the disk is full.
    """

    def __init__(self, target: Target, config: DataConfig) -> None:
        check_output_layer(target)
        self.target, self.config, self.out = target, config, config.out
        self.turns = ChatTurns(target, writes_questions=config.prompts is None)
        self._prompts = load_prompts(config.prompts) if config.prompts else None

    def run(self, report: Callable[[DataProgress], None] | None = None) -> Counter[str]:
        """Make what is missing; returns the counts over all shards."""
        answer_tokens = self.config.answer_tokens
        with _folder_lock(self.out):
            self._claim_folder()
            done = shards(self.out)
            totals = sum((read_stats(path) for path in done), Counter())
            clock = _Clock(totals["answer_tokens"], answer_tokens, report)
            number, barren = len(done), 0
            while totals["answer_tokens"] < answer_tokens and not self._exhausted(number):
                made = self._make_shard(number, clock)
                totals += made
                clock.done = totals["answer_tokens"]
                number += 1
                barren = 0 if made["rows"] else barren + 1
                if barren == MOST_BARREN and self._prompts is None:
                    raise SpecdecError(
                        f"all of {barren * self.config.shard_size} conversations were dropped "
                        f"({_dropped(totals)}): is {self.target.model.name_or_path} a chat model, "
                        "and does its template fit? Longer max_question and max_answer, and loops: "
                        "trim, keep more"
                    )
            return totals

    def _exhausted(self, shard: int) -> bool:
        return self._prompts is not None and shard * self.config.shard_size >= len(self._prompts)

    def _make_shard(self, shard: int, clock: _Clock) -> Counter[str]:
        talks = self._conversations(shard)
        # Long ones together: a step costs what its longest row costs.
        talks.sort(key=lambda talk: (-talk.longest, talk.number))
        jobs = [job for talk in talks if (job := talk.first_job()) is not None]
        pool = GenerationPool(self.target, self.config.batch_size)
        pool.run(jobs, lambda: clock.tick(shard, talks))
        talks.sort(key=lambda talk: talk.number)
        rows = [row for talk in talks for row in talk.rows]
        stats = sum((talk.counts for talk in talks), Counter())
        path = self.out / f"shard-{shard:05d}.jsonl"
        write_atomically(stats_path(path), json.dumps(stats, indent=1))
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        return stats

    def _conversations(self, shard: int) -> list[Conversation]:
        size = self.config.shard_size
        numbers = range(shard * size, (shard + 1) * size)
        prompts: list[list[str]] | None = None
        if self._prompts is not None:
            prompts = self._prompts[numbers.start : numbers.stop]
            numbers = numbers[: len(prompts)]
        # What counts as seen is what stands in the shards before: a resumed run sees the same.
        seen = NearDuplicates()
        for path in shards(self.out)[:shard]:
            for row in read_jsonl(path):
                if row["turn"] == 0:
                    seen.add(row["question"])
        limit = self.target.max_positions
        return [
            Conversation(number, self.config, self.turns, seen, limit, given)
            for number, given in zip(numbers, prompts or [[]] * len(numbers), strict=True)
        ]

    def _claim_folder(self) -> None:
        record = self.config.record()
        if self._prompts is not None:
            record["prompts_hold"] = contents(self._prompts)
        path = self.out / "data.json"
        if not path.exists():
            if shards(self.out):
                raise SpecdecError(f"{self.out} holds shards but no data.json: use another folder")
            write_atomically(path, json.dumps(record, indent=1))
            return
        named = differences(read_json(path), record)
        if named:
            raise SpecdecError(
                f"{self.out} was made with other settings ({named}): use those, or another folder"
            )


def _dropped(counts: Counter[str]) -> str:
    """Why conversations gave no rows, the most frequent reason first."""
    reasons = Counter(
        {name: n for name, n in counts.items() if name.startswith(("dropped", "looping"))}
    )
    return ", ".join(f"{name.replace('_', ' ')}: {n}" for name, n in reasons.most_common())


@contextmanager
def _folder_lock(out: Path) -> Iterator[None]:
    """Only one process fills a folder; the lock goes with the process, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise SpecdecError(
            f"another process is filling {out}: wait for it, or use another folder"
        ) from None
    except OSError as error:
        raise SpecdecError(f"cannot write to {out}: {error.strerror}") from error


class ChatTurns:
    """The target's chat template as token ids: what stands before and between what is said.

    A target without one continues a given prompt as it is; turns stand one behind the other.

    Attributes:
        opening: up to the first word of the user.
        to_answer: from the last word of the user to the first of the answer.
        to_user: from the last word of an answer to the first of the next user turn.
        ends: ids that end a turn.
    """

    def __init__(self, target: Target, writes_questions: bool = True) -> None:
        self.tokenizer = tokenizer = target.tokenizer
        if getattr(tokenizer, "chat_template", None):
            first, second, third = (f"\u2402{number}\u2402" for number in range(3))
            self.opening, self.to_answer = self._between([first])
            self.to_user = self._between([first, second, third])[2]
        elif writes_questions or tokenizer is None:
            raise SpecdecError(
                f"{target.model.name_or_path or 'the target'} has no chat template, which says where "
                "a user's words end and the answer begins: use a chat model as target, or give it "
                "texts to continue (prompts)"
            )
        else:
            whole, bare = list(tokenizer("a")["input_ids"]), self.encode("a")
            self.opening = whole[: len(whole) - len(bare)]
            self.to_answer, self.to_user = [], []
        ends = target.default_eos
        ids = [*(ends if isinstance(ends, list) else [ends]), *tokenizer.all_special_ids]
        self.ends = frozenset(index for index in ids if index is not None)

    def _between(self, said: list[str]) -> list[list[int]]:
        """Ids of what the template puts before, between and after these turns."""
        roles = ("user", "assistant") * len(said)
        text = self.tokenizer.apply_chat_template(
            [{"role": role, "content": words} for role, words in zip(roles, said, strict=False)],
            tokenize=False,
            add_generation_prompt=True,
        )
        parts = re.split("|".join(said), text)
        if len(parts) != len(said) + 1:
            raise SpecdecError("the target's chat template changes or leaves out what is said")
        return [self.encode(part) for part in parts]

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class Conversation:
    """One conversation as a chain of jobs; `rows` and `counts` are its outcome.

    Args:
        given: the user's turns when they are not the target's own, else empty.
        limit: most tokens that the target's positions allow.
    """

    def __init__(
        self,
        number: int,
        config: DataConfig,
        turns: ChatTurns,
        seen: NearDuplicates,
        limit: int | None,
        given: list[str],
    ) -> None:
        self.number, self.config, self.turns = number, config, turns
        self.seen, self.limit, self.given = seen, limit, given
        self.rows: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter(conversations=1)
        self.question = ""
        draw = random.Random(f"{config.seed}/{number}")
        self.greedy = draw.random() < config.greedy_share
        self.turn_count = 2 if draw.random() < config.second_turn_share else 1
        self.opener = _draw_opener(draw, config)
        self.opened = turns.encode(draw.choice(self.opener.texts)) if self.opener else []
        self.asked = [turns.encode(text) for text in given]
        if given:
            self.opener, self.turn_count = None, len(given)
        self.question_tokens = self.opener.max_new if self.opener else config.max_question
        self.longest = self._longest()

    def _longest(self) -> int:
        """Most tokens that this conversation can come to."""
        turns = self.turns
        glue = len(turns.opening) + self.turn_count * (len(turns.to_answer) + len(turns.to_user))
        said = sum(map(len, self.asked))
        if not self.asked:
            said = len(self.opened) + self.question_tokens
            said += (self.turn_count - 1) * FOLLOW_UP_TOKENS
        return glue + said + self.turn_count * self.config.max_answer

    def first_job(self) -> Job | None:
        """The job that starts it; None when it is refused at once."""
        if self.limit is not None and self.longest > self.limit:
            self.counts["dropped_too_long"] += 1
            return None
        opening = self.turns.opening
        if not self.asked:
            return self._question_job(opening, self.opened, 0, self.question_tokens)
        if not self.seen.add(self.given[0]):
            self.counts["dropped_duplicate_question"] += 1
            return None
        return self._answer_job(opening + self.asked[0], self.given[0], 0)

    def _question_job(self, context: list[int], opened: list[int], turn: int, limit: int) -> Job:
        return Job(
            context + opened,
            limit,
            self.turns.ends,
            seed=f"{self.config.seed}/{self.number}/question{turn}",
            top_p=QUESTION_TOP_P,
            then=lambda job: self._asked(job, opened, turn),
        )

    def _asked(self, job: Job, opened: list[int], turn: int) -> Job | None:
        """The question has been written: refuse it, or have it answered."""
        said = _without_stop(job)
        question = self.turns.decode(opened + said)
        self.counts["question_tokens"] += len(job.output)
        fault = self._fault(job, question, turn)
        if fault is not None:
            self.counts[f"dropped_{fault}"] += 1
            return None
        return self._answer_job(job.prompt + said, question, turn)

    def _fault(self, job: Job, question: str, turn: int) -> str | None:
        if len(words_of(question)) < 2:
            return "empty_question"
        if _loops(job):
            return "looping_question"
        if turn == 0 and not self.seen.add(question):
            return "duplicate_question"
        return None

    def _answer_job(self, context: list[int], question: str, turn: int) -> Job:
        return Job(
            context + self.turns.to_answer,
            self.config.max_answer,
            self.turns.ends,
            seed=None if self.greedy else f"{self.config.seed}/{self.number}/answer{turn}",
            then=lambda job: self._answered(job, question, turn),
        )

    def _answered(self, job: Job, question: str, turn: int) -> Job | None:
        """The answer is there: keep it, and go on with the next turn if there is one."""
        self.counts["answers"] += 1
        self.counts["generated_answer_tokens"] += len(job.output)
        if _loops(job):
            self.counts["looping_answers"] += 1
            kept = before_repetition(job.output)
            if self.config.loops == "trim" and len(kept) >= SHORTEST_TRIMMED:
                self._keep(job, question, turn, kept, "loop")
            return None
        if not _without_stop(job):
            self.counts["dropped_empty_answer"] += 1
            return None
        self._keep(job, question, turn, job.output, str(job.finish))
        if turn + 1 == self.turn_count:
            return None
        context = job.prompt + _without_stop(job) + self.turns.to_user
        if not self.asked:
            return self._question_job(context, [], turn + 1, FOLLOW_UP_TOKENS)
        return self._answer_job(context + self.asked[turn + 1], self.given[turn + 1], turn + 1)

    def _keep(self, job: Job, question: str, turn: int, answer: list[int], finish: str) -> None:
        self.counts["rows"] += 1
        self.counts["answer_tokens"] += len(answer)
        category = "given" if self.given else self.opener.category if self.opener else "open"
        self.rows.append(
            {
                "id": f"{self.config.seed}-{self.number:08d}-{turn}",
                "category": category,
                "turn": turn,
                "sampled": not self.greedy,
                "finish": finish,
                "question": question,
                "prompt_ids": job.prompt,
                "answer_ids": answer,
            }
        )


def _draw_opener(draw: random.Random, config: DataConfig) -> Opener | None:
    if draw.random() >= config.opened_share:
        return None
    return draw.choices(OPENERS, [opener.weight for opener in OPENERS])[0]


def _without_stop(job: Job) -> list[int]:
    return job.output[:-1] if job.finish == "stop" else job.output


def _loops(job: Job) -> bool:
    return job.finish == "loop" or distinct_share(job.output) < DISTINCT_SHARE


def before_repetition(ids: list[int]) -> list[int]:
    """The part of `ids` before its final run of repeated 8-grams, or, without such a run, the
    longest beginning that is no loop."""
    seen: set[tuple[int, ...]] = set()
    repeated = []
    for i in range(len(ids) - NGRAM + 1):
        gram = tuple(ids[i : i + NGRAM])
        repeated.append(gram in seen)
        seen.add(gram)
    end = len(repeated)
    while end and repeated[end - 1]:
        end -= 1
    kept = ids[: end + NGRAM - 1] if end < len(repeated) else ids
    while distinct_share(kept) < DISTINCT_SHARE:
        kept = kept[:-NGRAM]
    return kept


class _Clock:
    """Turns the state of the shard in work into a Progress now and then."""

    EVERY_S = 1.0

    def __init__(self, done: int, goal: int, report: Callable[[DataProgress], None] | None) -> None:
        self.done = self.first_done = done
        self.goal, self.report = goal, report
        self.started = self.last = time.monotonic()

    def tick(self, shard: int, talks: list[Conversation]) -> None:
        now = time.monotonic()
        if self.report is None or now - self.last < self.EVERY_S:
            return
        self.last = now
        counts = sum((talk.counts for talk in talks), Counter())
        answered = self.done + counts["answer_tokens"]
        rate = (answered - self.first_done) / (now - self.started)
        left = max(self.goal - answered, 0) / rate if rate else float("inf")
        self.report(DataProgress(shard, answered, self.goal, rate, left, counts))
