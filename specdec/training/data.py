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

import hashlib
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.errors import SpecdecError
from specdec.model import CachedModel
from specdec.training.openers import OPENERS, Opener
from specdec.training.pool import DISTINCT_SHARE, NGRAM, GenerationPool, Job, distinct_share

FORMAT = 1
QUESTION_TOP_P = 0.95
FOLLOW_UP_TOKENS = 100
SHORTEST_TRIMMED = 16


@dataclass(frozen=True)
class DataSettings:
    """What decides the rows of a data folder; stored in its `data.json`.

    Attributes:
        target: name of the target, for the record.
        prompts: None lets the target write its questions; otherwise a JSONL file or a `datasets`
            name (`name`, `name:split` or `name/config:split`).
        seed: of every draw.
        shard_size: conversations in a shard.
        batch_size: rows generated together.
        max_question, max_answer: most tokens of each.
        greedy_share: share of the answers decoded greedily; the others are drawn at temperature 1.
        opened_share: share of the questions whose first words are given (see `openers.py`).
        second_turn_share: share of the conversations with a second question and answer.
        loops: "drop" leaves out an answer with less than 70 % distinct 8-grams; "trim" keeps the
            part of it before the repetition.
    """

    target: str
    prompts: str | None = None
    seed: int = 0
    shard_size: int = 512
    batch_size: int = 64
    max_question: int = 200
    max_answer: int = 256
    greedy_share: float = 0.5
    opened_share: float = 0.5
    second_turn_share: float = 0.2
    loops: str = "drop"


@dataclass
class Progress:
    """How far a running synthesis is; `counts` are those of the shard in work."""

    shard: int
    answer_tokens: int
    goal: int
    tokens_per_s: float
    seconds_left: float
    counts: Counter[str]


class DataSynthesis:
    """Fills the folder `out` with shards until they hold `answer_tokens` tokens of answers.

    Raises:
        SpecdecError: the folder was made with other settings or is being filled by another
            process, the tokenizer has no chat template that questions could be written in, a
            prompt source is empty or unreadable, or the disk is full.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: DataSettings,
        out: Path,
    ) -> None:
        self.model, self.settings, self.out = CachedModel(model), settings, out
        self.turns = ChatTurns(tokenizer, model)
        self._prompts = load_prompts(settings.prompts) if settings.prompts else None

    def run(
        self, answer_tokens: int, report: Callable[[Progress], None] | None = None
    ) -> Counter[str]:
        """Make what is missing; returns the counts over all shards."""
        with _folder_lock(self.out):
            self._claim_folder()
            done = shards(self.out)
            totals = sum((read_stats(path) for path in done), Counter())
            clock = _Clock(totals["answer_tokens"], answer_tokens, report)
            number = len(done)
            while totals["answer_tokens"] < answer_tokens and not self._exhausted(number):
                totals += self._make_shard(number, clock)
                clock.done = totals["answer_tokens"]
                number += 1
            return totals

    def _exhausted(self, shard: int) -> bool:
        return self._prompts is not None and shard * self.settings.shard_size >= len(self._prompts)

    def _make_shard(self, shard: int, clock: _Clock) -> Counter[str]:
        talks = self._conversations(shard)
        # Long ones together: a step costs what its longest row costs.
        talks.sort(key=lambda talk: (-talk.longest, talk.number))
        jobs = [job for talk in talks if (job := talk.first_job()) is not None]
        pool = GenerationPool(self.model, self.settings.batch_size)
        pool.run(jobs, lambda: clock.tick(shard, talks))
        talks.sort(key=lambda talk: talk.number)
        rows = [row for talk in talks for row in talk.rows]
        stats = sum((talk.counts for talk in talks), Counter())
        path = self.out / f"shard-{shard:05d}.jsonl"
        write_atomically(_stats_path(path), json.dumps(stats, indent=1))
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        return stats

    def _conversations(self, shard: int) -> list[Conversation]:
        size = self.settings.shard_size
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
        limit = self.model.max_positions
        return [
            Conversation(number, self.settings, self.turns, seen, limit, given)
            for number, given in zip(numbers, prompts or [[]] * len(numbers), strict=True)
        ]

    def _claim_folder(self) -> None:
        record = {"format": FORMAT, **asdict(self.settings)}
        path = self.out / "data.json"
        if not path.exists():
            if shards(self.out):
                raise SpecdecError(f"{self.out} holds shards but no data.json: use another folder")
            write_atomically(path, json.dumps(record, indent=1))
            return
        found = read_json(path)
        other = [key for key in record if found.get(key) != record[key]]
        if other:
            named = ", ".join(f"{k}: {found.get(k)!r} there, {record[k]!r} now" for k in other)
            raise SpecdecError(
                f"{self.out} was made with other settings ({named}): use those, or another folder"
            )


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

    Attributes:
        opening: up to the first word of the user.
        to_answer: from the last word of the user to the first of the answer.
        to_user: from the last word of an answer to the first of the next user turn.
        ends: ids that end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        if not tokenizer.chat_template:
            raise SpecdecError(
                f"the tokenizer of {model.name_or_path or 'the target'} has no chat template, so "
                "it cannot write a user's questions: use a chat model as target"
            )
        said = ["\u2402first\u2402", "\u2402second\u2402", "\u2402third\u2402"]
        roles = ("user", "assistant", "user")
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": words} for role, words in zip(roles, said, strict=True)],
            tokenize=False,
            add_generation_prompt=True,
        )
        parts = re.split("|".join(said), str(text))
        if len(parts) != 4:
            raise SpecdecError("the chat template changes or leaves out what the user says")
        first = tokenizer.apply_chat_template(
            [{"role": "user", "content": said[0]}], tokenize=False, add_generation_prompt=True
        )
        opening, to_answer = str(first).split(said[0])
        self.tokenizer = tokenizer
        self.opening, self.to_answer = self.encode(opening), self.encode(to_answer)
        self.to_user = self.encode(parts[2])
        configured = getattr(model.generation_config, "eos_token_id", None)
        ends = configured if isinstance(configured, list) else [configured]
        self.ends = frozenset(
            i for i in [*ends, tokenizer.eos_token_id, *tokenizer.all_special_ids] if i is not None
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

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
        settings: DataSettings,
        turns: ChatTurns,
        seen: NearDuplicates,
        limit: int | None,
        given: list[str],
    ) -> None:
        self.number, self.settings, self.turns = number, settings, turns
        self.seen, self.limit, self.given = seen, limit, given
        self.rows: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter(conversations=1)
        self.question = ""
        draw = random.Random(f"{settings.seed}/{number}")
        self.greedy = draw.random() < settings.greedy_share
        self.turn_count = 2 if draw.random() < settings.second_turn_share else 1
        self.opener = _draw_opener(draw, settings)
        self.opened = turns.encode(draw.choice(self.opener.texts)) if self.opener else []
        self.asked = [turns.encode(text) for text in given]
        if given:
            self.opener, self.turn_count = None, len(given)
        self.question_tokens = self.opener.max_new if self.opener else settings.max_question
        self.longest = self._longest()

    def _longest(self) -> int:
        """Most tokens that this conversation can come to."""
        turns = self.turns
        glue = len(turns.opening) + self.turn_count * (len(turns.to_answer) + len(turns.to_user))
        said = sum(map(len, self.asked))
        if not self.asked:
            said = len(self.opened) + self.question_tokens
            said += (self.turn_count - 1) * FOLLOW_UP_TOKENS
        return glue + said + self.turn_count * self.settings.max_answer

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
            seed=f"{self.settings.seed}/{self.number}/question{turn}",
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
        if len(normalise(question)) < 2:
            return "empty_question"
        if _loops(job):
            return "looping_question"
        if turn == 0 and not self.seen.add(question):
            return "duplicate_question"
        return None

    def _answer_job(self, context: list[int], question: str, turn: int) -> Job:
        return Job(
            context + self.turns.to_answer,
            self.settings.max_answer,
            self.turns.ends,
            seed=None if self.greedy else f"{self.settings.seed}/{self.number}/answer{turn}",
            then=lambda job: self._answered(job, question, turn),
        )

    def _answered(self, job: Job, question: str, turn: int) -> Job | None:
        """The answer is there: keep it, and go on with the next turn if there is one."""
        self.counts["answers"] += 1
        self.counts["generated_answer_tokens"] += len(job.output)
        if _loops(job):
            self.counts["looping_answers"] += 1
            kept = before_repetition(job.output)
            if self.settings.loops == "trim" and len(kept) >= SHORTEST_TRIMMED:
                self._keep(job, question, turn, kept, "loop")
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
                "id": f"{self.settings.seed}-{self.number:08d}-{turn}",
                "category": category,
                "turn": turn,
                "sampled": not self.greedy,
                "finish": finish,
                "question": question,
                "prompt_ids": job.prompt,
                "answer_ids": answer,
            }
        )


def _draw_opener(draw: random.Random, settings: DataSettings) -> Opener | None:
    if draw.random() >= settings.opened_share:
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


class NearDuplicates:
    """Questions seen so far, found again by MinHash over their runs of three words.

    Two questions count as the same when an estimated 60 % of those runs are shared. 64 hashes in
    16 bands of 4 make it likely that such a pair meets in one band.
    """

    HASHES, BANDS, SIMILAR, SHINGLE = 64, 16, 0.6, 3

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self._scale = draw.integers(1, 2**32, self.HASHES, dtype=np.uint64) | np.uint64(1)
        self._shift = draw.integers(0, 2**32, self.HASHES, dtype=np.uint64)
        self._signatures: list[np.ndarray] = []
        self._bands: dict[bytes, list[int]] = {}

    def add(self, text: str) -> bool:
        """Remember `text`; False when something much like it is there already."""
        signature = self._signature(text)
        keys = [
            bytes([band]) + part.tobytes()
            for band, part in enumerate(np.split(signature, self.BANDS))
        ]
        for other in {other for key in keys for other in self._bands.get(key, ())}:
            if (self._signatures[other] == signature).mean() >= self.SIMILAR:
                return False
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(signature)
        return True

    def _signature(self, text: str) -> np.ndarray:
        words = normalise(text)
        grams = {
            " ".join(words[i : i + self.SHINGLE])
            for i in range(max(len(words) - self.SHINGLE + 1, 1))
        }
        hashed = np.array([_hash32(gram) for gram in grams], dtype=np.uint64)
        mixed = (hashed[:, None] * self._scale + self._shift) >> np.uint64(32)
        return mixed.min(0)


def _hash32(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def normalise(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


@dataclass
class Overlap:
    """How much of one benchmark question stands in the data: `share` of its word 8-grams."""

    question: str
    share: float
    rows: list[str] = field(default_factory=list)

    @property
    def contaminated(self) -> bool:
        """At least a fifth, the border that Touvron et al. (2023, Llama 2, A.6) call not clean."""
        return self.share >= 0.2


def find_overlap(
    texts: Iterable[tuple[str, str]], questions: Iterable[str], n: int = 8
) -> list[Overlap]:
    """Benchmark `questions` of which some run of `n` words stands in `texts` ((id, text) pairs).

    A question of fewer than `n` words is looked for as a whole.
    """
    wanted: dict[tuple[str, ...], list[int]] = {}
    asked = list(dict.fromkeys(questions))
    grams = [_word_grams(normalise(question), n) for question in asked]
    for index, own in enumerate(grams):
        for gram in own:
            wanted.setdefault(gram, []).append(index)
    lengths = {len(gram) for gram in wanted}
    found: dict[int, dict[tuple[str, ...], str]] = {}
    for name, text in texts:
        words = normalise(text)
        for length in lengths:
            for start in range(len(words) - length + 1):
                gram = tuple(words[start : start + length])
                for index in wanted.get(gram, ()):
                    found.setdefault(index, {}).setdefault(gram, name)
    overlaps = [
        Overlap(asked[index], len(hits) / len(grams[index]), sorted(set(hits.values())))
        for index, hits in found.items()
    ]
    return sorted(overlaps, key=lambda overlap: -overlap.share)


def _word_grams(words: list[str], n: int) -> set[tuple[str, ...]]:
    if not words:
        return set()
    return {tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, 1))}


def load_prompts(source: str) -> list[list[str]]:
    """The user turns of every conversation in a JSONL file or a `datasets` name.

    A line has `turns` (a list of user messages), or `prompt`, `question` or `instruction` (one
    message), or `messages` (a chat, of which the user's messages are taken).
    """
    path = Path(source)
    rows = read_jsonl(path) if path.suffix in {".jsonl", ".json"} else _dataset_rows(source)
    prompts = []
    for number, row in enumerate(rows, 1):
        turns = _user_turns(row)
        if not turns:
            raise SpecdecError(
                f"{source}, row {number}: no prompt found (keys: {', '.join(row)}); expected "
                "one of turns, messages, prompt, question, instruction"
            )
        prompts.append(turns)
    if not prompts:
        raise SpecdecError(f"{source} holds no prompts")
    return prompts


def _user_turns(row: dict[str, Any]) -> list[str]:
    if row.get("turns"):
        return [str(turn) for turn in row["turns"]]
    if row.get("messages"):
        return [str(m["content"]) for m in row["messages"] if m.get("role") == "user"]
    for key in ("prompt", "question", "instruction"):
        if row.get(key):
            return [str(row[key])]
    return []


def _dataset_rows(source: str) -> Iterator[dict[str, Any]]:
    name, _, split = source.partition(":")
    try:
        import datasets
    except ImportError:
        raise SpecdecError(
            f"prompts {source!r}: not a JSONL file, and reading it as a data set's name needs the "
            "package `datasets` (pip install datasets)"
        ) from None
    try:
        return iter(datasets.load_dataset(name, split=split or "train"))
    except Exception as error:
        raise SpecdecError(
            f"prompts {source!r}: neither a JSONL file nor a data set that `datasets` can load "
            f"({error})"
        ) from error


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a line that is none is named in the error."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise SpecdecError(f"{path}, line {number}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise SpecdecError(f"{path}, line {number}: expected an object, found {row!r}")
                yield row
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error


def shards(folder: Path) -> list[Path]:
    """The complete shards of a data folder, in order; they must be numbered without a gap."""
    found = sorted(folder.glob("shard-?????.jsonl"))
    for number, path in enumerate(found):
        if path.name != f"shard-{number:05d}.jsonl":
            raise SpecdecError(f"{folder}: shard {number} is missing, though {path.name} is there")
    return found


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every row of a data folder, in order."""
    for path in shards(folder):
        yield from read_jsonl(path)


def read_stats(shard: Path) -> Counter[str]:
    """What was made and dropped in a shard."""
    return Counter(read_json(_stats_path(shard)))


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SpecdecError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SpecdecError(f"{path}: not a JSON object ({error})") from error


def _stats_path(shard: Path) -> Path:
    return shard.with_suffix(".stats.json")


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either there in full or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SpecdecError(
            f"cannot write {path}: {error.strerror}; what was complete before is kept"
        ) from error


class _Clock:
    """Turns the state of the shard in work into a Progress now and then."""

    EVERY_S = 1.0

    def __init__(self, done: int, goal: int, report: Callable[[Progress], None] | None) -> None:
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
        self.report(Progress(shard, answered, self.goal, rate, left, counts))
