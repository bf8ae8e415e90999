"""Training text made by the target: resuming, loops, duplicates, overlap with a benchmark."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM
from typer.testing import CliRunner

from specdec.cli import make_app
from specdec.errors import SpecdecError
from specdec.target import Target
from specdec.training.data import ChatTurns, DataConfig, DataSynthesis, before_repetition
from specdec.training.files import read_rows, shards
from specdec.training.layers import check_output_layer
from specdec.training.overlap import NearDuplicates, find_overlap
from specdec.training.pool import GenerationPool, Job, distinct_share
from specdec.training.sequences import load_texts
from tests.training import data_config, make_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random chat model."""
    return make_chat_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(str(folder), dtype="float32")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.json*")}


# --- the pool ------------------------------------------------------------------------------------


def test_greedy_texts_equal_those_of_transformers(target: Target) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 64, (n,), generator=generator).tolist() for n in (1, 30, 5, 17, 2)]
    jobs = [Job(prompt, 20, frozenset([1])) for prompt in prompts]
    GenerationPool(target, size=2).run(jobs)
    for job in jobs:
        whole = target.model.generate(
            torch.tensor([job.prompt]), max_new_tokens=20, do_sample=False, eos_token_id=1
        )[0].tolist()
        assert job.output, "every job is generated"
        assert job.prompt + job.output == whole[: len(job.prompt) + len(job.output)]
        assert job.finish == "loop" or len(job.prompt) + len(job.output) == len(whole)


def test_a_following_job_reuses_the_row_and_gives_what_it_gives_alone(target: Target) -> None:
    def follow(job: Job) -> Job:
        followers.append(Job(job.prompt + job.output + [5, 6, 7], 15, frozenset([1])))
        return followers[-1]

    followers: list[Job] = []
    jobs = [Job([4 + n, 9], 6, frozenset([1]), then=follow) for n in range(5)]
    GenerationPool(target, size=3).run(jobs)
    assert len(followers) == 5
    for job in followers:
        alone = Job(job.prompt, 15, frozenset([1]))
        GenerationPool(target, size=1).run([alone])
        assert alone.output == job.output


def test_draws_follow_the_nucleus_of_the_model(target: Target) -> None:
    """2,000 first tokens against the probabilities that a sort gives."""
    top_p, count = 0.7, 2000
    jobs = [Job([7, 8], 1, frozenset(), seed=f"s{n}", top_p=top_p) for n in range(count)]
    GenerationPool(target, size=500).run(jobs)
    with torch.no_grad():
        probs = target.model(torch.tensor([[7, 8]])).logits[0, -1].softmax(-1)
    ranked, order = probs.sort(descending=True)
    kept = ranked * ((ranked.cumsum(0) - ranked) < top_p)
    expected = torch.zeros_like(probs).scatter(0, order, kept / kept.sum())
    drawn = torch.bincount(torch.tensor([job.output[0] for job in jobs]), minlength=len(probs))
    assert not drawn[expected == 0].any()
    distance = (drawn / count - expected).abs().sum() / 2
    assert 0 < distance < 0.04  # 4 standard deviations of the sum for this many draws


def test_a_loop_is_ended_early() -> None:
    job = Job([1], 400, frozenset())
    for step in range(400):
        job.push(step if step < 30 else 100 + step % 5)
        if job.finish:
            break
    assert job.finish == "loop"
    assert len(job.output) < 100


# --- a data folder -------------------------------------------------------------------------------


def test_rows_are_what_the_target_says(target: Target, folder: Path, tmp_path: Path) -> None:
    config = data_config(folder, tmp_path, loops="drop", greedy_share=1.0)
    totals = DataSynthesis(target, config).run()
    rows = list(read_rows(tmp_path))
    assert len(rows) == totals["rows"]
    assert sum(len(row["answer_ids"]) for row in rows) == totals["answer_tokens"] >= 400
    assert {row["turn"] for row in rows} == {0, 1}
    turns = ChatTurns(target)
    for row in rows:
        prompt, answer = row["prompt_ids"], row["answer_ids"]
        assert prompt[: len(turns.opening)] == turns.opening
        assert prompt[-len(turns.to_answer) :] == turns.to_answer
        whole = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=len(answer), do_sample=False
        )
        assert whole[0, len(prompt) :].tolist() == answer


def test_loops_are_dropped_or_trimmed(tmp_path: Path) -> None:
    folder = make_chat_model(tmp_path / "target", spread=0.1)
    target = Target.load(str(folder), dtype="float32")
    dropped = data_config(folder, tmp_path / "drop", greedy_share=1.0, max_answer=100)
    totals = DataSynthesis(target, dropped).run()
    assert totals["looping_answers"] > 0, "greedy answers of this model loop"
    rows = list(read_rows(dropped.out))
    assert all(row["finish"] != "loop" for row in rows)
    assert all(distinct_share(row["answer_ids"]) >= 0.7 for row in rows)

    trimmed = dropped.model_copy(update={"out": tmp_path / "trim", "loops": "trim"})
    DataSynthesis(target, trimmed).run()
    cut = [row for row in read_rows(trimmed.out) if row["finish"] == "loop"]
    assert cut
    assert all(distinct_share(row["answer_ids"]) >= 0.7 for row in cut)


def test_before_repetition_keeps_what_is_new() -> None:
    new, loop = list(range(30)), [90, 91, 92, 93, 94]
    assert before_repetition(new) == new
    assert before_repetition(new + loop * 6)[:35] == new + loop
    assert len(before_repetition(new + loop * 6)) < 45


def test_a_killed_run_goes_on_with_the_rows_it_would_have_given(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    whole = data_config(folder, tmp_path / "whole", greedy_share=0.5, loops="trim")
    DataSynthesis(target, whole).run()
    assert len(shards(whole.out)) >= 3

    killed = whole.model_copy(update={"out": tmp_path / "killed"})
    finished = _run_until_killed(killed)
    assert finished == -signal.SIGKILL
    assert 0 < len(shards(killed.out)) < len(shards(whole.out))
    DataSynthesis(target, killed).run()
    assert files(killed.out) == files(whole.out)
    ids = [row["id"] for row in read_rows(killed.out)]
    assert len(ids) == len(set(ids))


def _run_until_killed(config: DataConfig) -> int:
    """Another process that kills itself (-9) in the middle of the second shard."""
    script = """
import os, signal, sys
from specdec.target import Target
from specdec.training import data

def kill(now):
    if now.shard == 1 and now.counts["rows"] >= 2:
        os.kill(os.getpid(), signal.SIGKILL)

data._Clock.EVERY_S = 0.0
config = data.DataConfig.model_validate_json(sys.argv[1])
data.DataSynthesis(Target.load(config.target.model, dtype="float32"), config).run(kill)
"""
    command = [sys.executable, "-c", script, config.model_dump_json()]
    return subprocess.run(command, check=False, capture_output=True).returncode


def test_another_configuration_in_the_folder_is_refused(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    config = data_config(folder, tmp_path, answer_tokens=10)
    DataSynthesis(target, config).run()
    more = config.model_copy(update={"answer_tokens": 200})
    assert DataSynthesis(target, more).run()["answer_tokens"] >= 200
    with pytest.raises(SpecdecError, match="seed: 0 there, 1 now"):
        DataSynthesis(target, config.model_copy(update={"seed": 1})).run()


def test_given_prompts_are_answered_once_each(target: Target, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    prompts = [{"prompt": f"w{n} w{2 * n} w{n + 9} w{n + 1} w{n + 2}"} for n in range(10)]
    prompts += [{"turns": ["w50 w51 w52", "w53 w54"]}, prompts[0], {"prompt": "w1 " * 300}]
    source.write_text("\n".join(map(json.dumps, prompts)))
    config = data_config(
        folder, tmp_path / "out", prompts=str(source), loops="trim", answer_tokens=10**6
    )
    totals = DataSynthesis(target, config).run()
    assert totals["dropped_duplicate_question"] == 1
    assert totals["dropped_too_long"] == 1
    rows = {row["id"]: row for row in read_rows(config.out)}
    assert len(rows) == totals["rows"] >= 10
    assert rows["0-00000003-0"]["question"] == prompts[3]["prompt"]


def test_a_target_without_a_chat_template_continues_given_prompts(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    base = copy.copy(target)
    base.tokenizer = copy.deepcopy(target.tokenizer)
    base.tokenizer.chat_template = None
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "w7 w8 w9 w10"}\n{"prompt": "w3 w11 w5"}\n')
    config = data_config(
        folder, tmp_path / "out", prompts=str(source), greedy_share=1.0, loops="trim"
    )
    DataSynthesis(base, config).run()
    rows = list(read_rows(tmp_path / "out"))
    assert [row["question"] for row in rows] == ["w7 w8 w9 w10", "w3 w11 w5"]
    for row in rows:
        prompt = base.tokenizer(row["question"], return_tensors="pt")["input_ids"]
        assert row["prompt_ids"] == prompt[0].tolist()
        written = base.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=len(row["answer_ids"]),
        )  # fmt: skip
        assert row["answer_ids"] == written[0, prompt.shape[1] :].tolist()
    with pytest.raises(SpecdecError, match=r"give it texts to continue \(prompts\)"):
        DataSynthesis(base, data_config(folder, tmp_path / "other"))


def test_other_prompts_in_the_same_file_are_refused(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "w1 w2 w3"}\n')
    config = data_config(folder, tmp_path / "out", prompts=str(source))
    DataSynthesis(target, config).run()
    source.write_text('{"prompt": "w4 w5 w6"}\n')
    with pytest.raises(SpecdecError, match=r"other settings \(prompts_hold: '1 \(\w+\)' there"):
        DataSynthesis(target, config).run()


def test_a_target_that_writes_no_questions_ends_the_run(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    config = data_config(folder, tmp_path, max_question=1)  # one word is no question
    with pytest.raises(
        SpecdecError, match=r"all of 24 .* were dropped \(dropped empty question: 24"
    ):
        DataSynthesis(target, config).run()
    with pytest.raises(SpecdecError, match=r"no conversations in .*: all were dropped when made"):
        load_texts([tmp_path], 100)


def test_a_target_that_scales_its_logits_is_refused(folder: Path, tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=8.0, pad_token_id=1,
    )  # fmt: skip
    scaled = Target(GraniteForCausalLM(config))
    with pytest.raises(SpecdecError, match="GraniteForCausalLM scales or caps its logits"):
        DataSynthesis(scaled, data_config(folder, tmp_path))
    config.logits_scaling = 1.0
    check_output_layer(Target(GraniteForCausalLM(config)))


def test_a_source_without_prompts_says_so(target: Target, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"text": "w1"}')
    with pytest.raises(SpecdecError, match=r"row 1: no prompt found \(keys: text\)"):
        DataSynthesis(target, data_config(folder, tmp_path, prompts=str(source)))


# --- duplicates and overlap ----------------------------------------------------------------------


def test_near_duplicates() -> None:
    seen = NearDuplicates()
    long = "Can you explain to me how a combustion engine turns fuel into motion, step by step?"
    assert seen.add(long)
    assert not seen.add(long.upper().replace(",", " "))
    assert not seen.add(long.replace("step by step", "step after step"))
    assert seen.add("Can you explain to me how a bill becomes a law?")
    assert seen.add("Why is the sky blue?")
    assert not seen.add("why is the sky blue")


def test_a_planted_benchmark_question_is_found() -> None:
    questions = [
        "Who plays the young captain in the third film of the series about the sea?",
        "What is the boiling point of water on top of the highest mountain on earth?",
        "Why not?",
    ]
    texts = [
        ("a", "Nothing to see here, only a text about mountains and the sea in general."),
        ("b", f"User: {questions[0].lower()} Assistant: An actor."),
    ]
    found = find_overlap(texts, questions)
    assert [(hit.question, hit.rows, hit.contaminated) for hit in found] == [
        (questions[0], ["b"], True)
    ]
    assert found[0].share == 1.0


# --- the command ---------------------------------------------------------------------------------


def test_command(folder: Path, tmp_path: Path) -> None:
    config, benchmark = tmp_path / "data.yaml", tmp_path / "benchmark.jsonl"
    config.write_text(
        f"target: {{model: {folder}, dtype: float32}}\nout: {tmp_path / 'out'}\n"
        "answer_tokens: 60\nshard_size: 8\nmax_question: 12\nmax_answer: 30\nopened_share: 0\n"
    )
    benchmark.write_text(json.dumps({"turns": ["w0 " * 12]}) + "\n")
    arguments = ["data", str(config), "--set", "answer_tokens=100000", "--check", str(benchmark)]
    with pytest.raises(SpecdecError, match=r"no data to check in .*out: make it first"):
        CliRunner().invoke(make_app(), arguments, catch_exceptions=False)
    run = CliRunner().invoke(make_app(), ["data", str(config)])
    assert run.exit_code == 0, run.output
    made = sorted((tmp_path / "out").iterdir())
    question = next(read_rows(tmp_path / "out"))["question"]
    assert CliRunner().invoke(make_app(), arguments).exit_code == 0
    benchmark.write_text(json.dumps({"turns": [question]}) + "\n")
    planted = CliRunner().invoke(make_app(), arguments)
    assert planted.exit_code == 1
    assert "1 of 1 questions" in planted.output
    assert sorted((tmp_path / "out").iterdir()) == made  # a check makes nothing
