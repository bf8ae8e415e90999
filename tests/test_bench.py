"""The benchmark: its grid, its questions, honest figures, runs that go on after a kill."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import plugins
from specdec.bench import store
from specdec.bench.config import read, variants
from specdec.bench.peers import Peer
from specdec.bench.questions import QuestionSettings, load_questions
from specdec.bench.runner import BenchRun, Progress
from specdec.bench.summary import (
    Table,
    find_differences,
    is_looping,
    median_interval,
    ratios_of,
    speed,
    summarise,
)
from specdec.errors import SpecdecError
from specdec.generation import GenerationSettings
from specdec.target import Target
from tests.bench_models import save_models, write_grid, write_questions

AR = {"name": "autoregressive", "model": "some/model"}


def grid(**keys: Any) -> list[str]:
    return [row.name for row in read(keys).rows]


# --- the grid -------------------------------------------------------------------------------------


def test_lists_expand_and_rows_get_names_of_their_own() -> None:
    names = grid(
        temperature=[0, 1],
        rows=[
            {"drafter": ["ngram", AR], "policy": {"name": "fixed", "length": [3, 5]}},
            {
                "drafter": "ngram",
                "policy": "svip",
                "temperature": 1,
                "name": "{drafter}, {policy}!",
            },
        ],
    )
    assert names == [
        "transformers, T=0", "transformers, T=1", "plain, T=0", "plain, T=1",
        "ngram + fixed (length=3), T=0", "ngram + fixed (length=3), T=1",
        "ngram + fixed (length=5), T=0", "ngram + fixed (length=5), T=1",
        "autoregressive + fixed (length=3), T=0", "autoregressive + fixed (length=3), T=1",
        "autoregressive + fixed (length=5), T=0", "autoregressive + fixed (length=5), T=1",
        "ngram, svip!, T=1",
    ]  # fmt: skip


def test_a_plain_configuration_is_a_benchmark_of_one_row() -> None:
    rows = read({"drafter": "ngram", "policy": "fixed", "generation": {"temperature": 0.7}}).rows
    assert [row.method for row in rows] == ["transformers", "plain", "ngram + fixed"]
    assert {row.temperature for row in rows} == {0.7}


def test_a_list_that_a_parameter_takes_is_no_list_of_values() -> None:
    cape = {"name": "cape", "base": AR, "thresholds": [0.5], "candidates": [4, 2]}
    assert list(variants("drafter", cape, "drafter")) == [cape]
    tables = {**cape, "candidates": [[4, 2], [3, 1]]}
    assert [v["candidates"] for v in variants("drafter", tables, "drafter")] == [[4, 2], [3, 1]]
    inner = {"name": "cape", "base": {**AR, "model": ["a", "b"]}}
    assert [v["base"]["model"] for v in variants("drafter", inner, "drafter")] == ["a", "b"]


def test_what_is_written_twice_is_measured_once() -> None:
    row = {"drafter": "ngram", "policy": "fixed"}
    assert grid(rows=[row, row, {"drafter": "none"}]) == ["transformers", "plain", "ngram + fixed"]


def test_assisted_generation_takes_the_drafters_of_the_grid() -> None:
    peers = ["transformers", "assisted", {"name": "assisted", "tokens": [3, 5], "threshold": 0}]
    config = read({"peers": peers, "drafter": {"name": "cape", "base": AR}})
    assisted = [row.peer for row in config.rows if row.peer and row.peer["name"] == "assisted"]
    assert [peer["model"] for peer in assisted] == ["some/model"] * 3
    assert [peer["tokens"] for peer in assisted] == [20, 3, 5]
    config = read({"peers": ["transformers", {"name": "assisted", "model": ["one", "two"]}]})
    assert [row.peer["model"] for row in config.rows if row.peer and "model" in row.peer] == [
        "one",
        "two",
    ]


def test_a_peer_may_be_measured_at_some_temperatures_only() -> None:
    peers = ["transformers", {"name": "prompt-lookup", "temperature": 0, "tokens": [5, 10]}]
    names = grid(peers=peers, temperature=[0, 1], drafter="ngram")
    assert [name for name in names if "lookup" in name] == [
        "transformers prompt lookup (tokens=5), T=0",
        "transformers prompt lookup (tokens=10), T=0",
    ]


def test_a_choice_without_a_name_is_the_default_one_changed() -> None:
    """As in the configuration of `specdec generate`."""
    config = read({"drafter": "ngram", "policy": {"threshold": [0.2, 0.4]}})
    chosen = [row.policy for row in config.rows if row.policy and row.method.startswith("ngram")]
    assert chosen == [{"name": "svip", "threshold": 0.2}, {"name": "svip", "threshold": 0.4}]


def test_what_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = read({"peers": ["transformers", "assisted"], "drafter": "ngram"})
    assert config.skipped == {
        "transformers assisted": "the grid has no autoregressive drafter to assist with",
        "transformers assisted: adaptive confidence threshold": (
            "transformers adapts it only with scikit-learn, which is not installed"
        ),
    }
    config = read({"peers": ["transformers", "prompt-lookup"], "batch_size": [1, 4]})
    assert config.skipped == {
        "transformers prompt lookup, batch 4": "transformers assists one prompt at a time"
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"row": []}, "row: unknown key. Did you mean 'rows'?"),
        ({"rows": [{"drafted": "ngram"}]}, "rows.0.drafted: unknown key. Did you mean 'drafter'?"),
        ({"policy": {"name": "fixed", "length": [3, 0]}}, "policy.length: Input should be greater"),
        ({"policy": {"name": "fixed", "size": 3}}, "policy.size: unknown key"),
        ({"rows": [{"policy": "swip"}]}, "rows.0.policy.name: unknown policy 'swip'. Did you mean"),
        ({"peers": ["vllm"]}, "peers.0: unknown peer 'vllm'. Allowed: assisted, prompt-lookup"),
        (
            {"baseline": "transformer"},
            "no row is called 'transformer'. Did you mean 'transformers'",
        ),
        ({"temperature": [0, -1]}, "temperature: expected numbers from 0 up (found -1)"),
        ({"batch_size": 1.5}, "batch_size: expected numbers from 1 up (found 1.5)"),
        ({"name": "x", "rows": []}, "name: unknown key"),
        ({"rows": [{"name": "{size}"}]}, "rows.0.name: '{size}' may hold {drafter} and {policy}"),
        ({"questions": {"source": "none.jsonl"}}, "questions.source: there is no file none.jsonl"),
        ({"generation": {"max_tokens": 3}}, "generation.max_tokens: unknown key"),
        (
            {"policy": "svip", "rows": [{"policy": "fixed"}, {"policy": "heuristic"}]},
            "policy: every row gives its own policy, so what stands above them would count for none",
        ),
        (
            {"temperature": 1, "rows": [{"temperature": 0}]},
            "temperature: every row gives its own",
        ),
        (
            {"generation": {"temperature": 1}, "rows": [{"temperature": 0}]},
            "generation.temperature: every row gives its own temperature",
        ),
        (
            {"generation": {"temperature": 1}, "temperature": 0},
            "generation.temperature: temperature is given too; keep one.",
        ),
        (
            {"lengths": [8], "batch_size": [1, 2]},
            "lengths: the first tokens of an answer are timed for one row at a time",
        ),
        ({"lengths": [0]}, "lengths.0: Input should be greater than or equal to 1"),
        (
            {"peers": ["transformers", {"name": "prompt-lookup", "temperature": 0.5}]},
            "peers.1.temperature: the grid has no temperature 0.5 (it has 0).",
        ),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        (
            {"temperature": [0, 1], "baseline": "a", "rows": [{"name": "a", "temperature": 1}, {}]},
            "'a' has no row at temperature 0",
        ),
    ],
)
def test_a_fault_is_told_with_its_place(document: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecdecError) as caught:
        read(document)
    assert message in str(caught.value)


def test_settings_of_the_command_line_stand_above_the_file(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("questions: builtin\ngeneration: {max_new_tokens: 9}\nlenghts: [3]\n")
    with pytest.raises(SpecdecError, match=r"grid.yaml:3: lenghts: unknown key"):
        read(path)
    path.write_text("questions: {source: builtin}\ngeneration: {max_new_tokens: 9}\n")
    config = read(path, ["generation.max_new_tokens=7", "questions.per_category=1"])
    assert config.generation.max_new_tokens == 7
    assert len(config.questions) == 13
    with pytest.raises(SpecdecError, match=r"--set questions.per_category: "):
        read(path, ["questions.per_category=0"])


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[1] / "benchmarks").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_the_shipped_grids_are_sound(path: Path) -> None:
    config = read(path, ["questions.source=builtin"])
    assert {"transformers", "plain"} <= {row.method for row in config.rows}


# --- questions ------------------------------------------------------------------------------------


def test_questions_of_our_own_cover_the_categories_of_the_papers() -> None:
    questions = load_questions(QuestionSettings())
    assert Counter(q.column for q in questions) == {
        "MT-Bench": 16, "translation": 2, "summarization": 2, "qa": 2, "math_reasoning": 2, "rag": 2,
    }  # fmt: skip
    assert len({q.category for q in questions[:13]}) == 13  # the categories take turns


def test_questions_are_chosen_by_category_number_and_turn(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "q.jsonl", per_category=3)
    settings = QuestionSettings(source=str(path), per_category=2, categories=["qa", "coding"])
    questions = load_questions(settings)
    assert [(q.category, len(q.turns)) for q in questions] == [("qa", 1), ("coding", 2)] * 2
    one_turn = load_questions(settings.model_copy(update={"turns": 1}))
    assert {len(q.turns) for q in one_turn} == {1}
    with pytest.raises(SpecdecError, match="has none of sums; it has writing, coding, qa, rag"):
        load_questions(QuestionSettings(source=str(path), categories=["sums"]))


def test_any_jsonl_with_prompts_will_do(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = load_questions(QuestionSettings(source=str(path)))
    assert [q.turns for q in questions] == [("a",), ("b",)]
    path.write_text('{"text": "a"}')
    with pytest.raises(SpecdecError, match=r"row 1: no question found \(keys: text\)"):
        load_questions(QuestionSettings(source=str(path)))
    path.write_text('{"prompt": "a", "id": 7}\n{"prompt": "b", "id": 7}')
    with pytest.raises(SpecdecError, match="question_id 7 is there twice"):
        load_questions(QuestionSettings(source=str(path)))


def test_a_data_set_is_read_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    questions = load_questions(QuestionSettings(source=str(folder)))
    assert [q.turns for q in questions] == [("a",), ("b",)]


def test_spec_bench_is_found_beside_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    write_questions(tmp_path / "data" / "spec_bench_part.jsonl")
    inside = tmp_path / "project" / "deep"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert len(load_questions(QuestionSettings(source="spec-bench"))) == 8


# --- one run --------------------------------------------------------------------------------------


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def summary_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())
    return found


def test_every_row_answers_every_question_once(bench_run: Path) -> None:
    config = yaml.safe_load((bench_run / "config.yaml").read_text())
    counts = Counter((line["row"], line["question"]) for line in lines_of(bench_run))
    assert set(counts.values()) == {1}
    assert len(counts) == len(config["rows"]) * 6
    summary = summary_of(bench_run)
    assert {row["category"] for row in summary} == {"MT-Bench", "qa", "rag", "all"}
    wanted = {
        "name", "category", "speedup_mean", "speedup_median", "speedup_ci95", "tau", "alpha",
        "tokens_per_s", "equal_to_baseline",
    }  # fmt: skip
    assert all(wanted <= set(row) for row in summary)
    assert len({(row["name"], row["category"]) for row in summary}) == len(summary)


def test_greedy_texts_are_those_of_transformers(bench_run: Path) -> None:
    folder = yaml.safe_load((bench_run / "config.yaml").read_text())["target"]["model"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = [
        json.loads(line) for line in (bench_run.parent / "questions.jsonl").read_text().splitlines()
    ]
    for line in lines_of(bench_run):
        if line["temperature"] > 0:
            continue
        question = questions[int(line["question"])]
        talk = [{"role": "user", "content": question["turns"][0]}]
        ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt")
        expected = model.generate(**ids, do_sample=False, max_new_tokens=16)
        new = expected[0, ids["input_ids"].shape[1] :].tolist()
        assert line["turns"][0]["token_ids"] == new, line["row"]
    for row in summary_of(bench_run):
        assert row["equal_to_baseline"] is (True if row["temperature"] == 0 else None)


def test_the_figures_follow_from_the_lines(bench_run: Path) -> None:
    """The papers' arithmetic, done once more in other words."""
    lines = {(line["row"], line["question"]): line for line in lines_of(bench_run)}
    for row in summary_of(bench_run):
        if row["batch_size"] != 1:
            continue
        ratios = defaultdict(list)
        tokens = seconds = 0.0
        for (name, question), line in lines.items():
            if name != row["name"] or row["category"] not in ("all", line["column"]):
                continue
            other = lines[f"transformers, T={row['temperature']:g}, B=1", question]
            mine, theirs = (
                each["tokens"] / (each["prefill_s"] + each["decode_s"]) for each in (line, other)
            )
            ratios[line["column"]].append(mine / theirs)
            tokens += line["tokens"]
            seconds += line["prefill_s"] + line["decode_s"]
        every = [ratio for some in ratios.values() for ratio in some]
        means = [statistics.mean(some) for some in ratios.values()]
        assert row["speedup_mean"] == pytest.approx(statistics.mean(means))
        assert row["speedup_median"] == pytest.approx(statistics.median(every))
        assert row["tokens_per_s"] == pytest.approx(tokens / seconds)
        low, high = row["speedup_ci95"]
        assert min(every) - 1e-9 <= low <= row["speedup_median"] <= high <= max(every) + 1e-9


def test_the_intervals_are_those_of_a_bootstrap() -> None:
    draws = torch.randn(60, generator=torch.Generator().manual_seed(1)).add(2).tolist()
    low, high = median_interval(draws)
    assert low < statistics.median(draws) < high
    # The median of n normal values has a standard deviation of about 1.25 / √n.
    assert 0.5 < (high - low) / (2 * 1.96 * 1.25 / 60**0.5) < 2
    assert median_interval([1.5] * 9) == [1.5, 1.5]


def test_speed_ups_of_the_beginnings_come_from_the_times_at_which_tokens_were_there() -> None:
    config = read({"drafter": "ngram", "lengths": [2, 4], "questions": {"per_category": 1}})
    first, second = config.questions[:2]
    lines = []
    for name, question, times in (
        ("transformers", first, {"2": 1.0, "4": 3.0}),
        ("transformers", second, {"2": 1.0}),
        ("ngram + svip", first, {"2": 1.0, "4": 1.5}),
        ("ngram + svip", second, {"2": 0.5}),
    ):
        lines.append(
            {
                "row": name, "method": name, "temperature": 0.0, "batch_size": 1,
                "question": question.id, "category": "a", "column": "a", "unit": question.id,
                "unit_size": 1, "unit_tokens": 4, "first_tokens": 1, "tokens": 4,
                "prefill_s": 1.0, "decode_s": 3.0, "draft_s": 0.0, "verify_s": 0.0,
                "memory_mb": None, "looping": question is second,
                "turns": [{"token_ids": [1], "rounds": []}], "length_s": times,
            }
        )  # fmt: skip
    entry = next(
        entry
        for entry in summarise(lines, config, [])
        if (entry["name"], entry["category"]) == ("ngram + svip", "all")
    )
    found = entry["speedup_by_length"]
    assert found["2"] == {
        "speedup_mean": 1.5, "speedup_median": 1.5, "speedup_ci95": [1.0, 2.0]
    }  # fmt: skip
    assert found["4"]["speedup_mean"] == 2.0, "the second answer never had four tokens"
    assert entry["without_loops"]["speedup_by_length"]["2"]["speedup_mean"] == 1.0


def test_a_batch_is_one_observation(bench_run: Path) -> None:
    """Its rows are timed together, so their ratio is one and the same."""
    lines = [line for line in lines_of(bench_run) if line["batch_size"] == 2]
    assert len(lines) == 2 * len({(line["row"], line["unit"]) for line in lines})
    table = Table(lines, read(bench_run.parent / "grid.yaml"))
    pairs = [line for line in lines if line["method"] == "pairs"]
    ratios = ratios_of(pairs, table.baseline, speed)
    assert sum(map(len, ratios.values())) == len(pairs) / 2


@pytest.mark.parametrize("stop", [None, 1, 2])
def test_a_batch_of_transformers_is_kept_without_its_padding(
    stop: int | None, tmp_path: Path
) -> None:
    target = Target.load(save_models(tmp_path)["target"], dtype="float32")
    prompts = [target.tokenizer(text)["input_ids"] for text in ("user: one", "user: a longer one")]

    def answers(stop: str | None, batch: list[list[int]]) -> list[list[int]]:
        settings = GenerationSettings(max_new_tokens=24, temperature=0.0, stop=stop)
        return Peer(target, settings, Peer.Params()).answer(batch, 0).token_ids

    text = None
    if stop is not None:  # what one of the rows writes on its way
        written = target.tokenizer.decode(answers(None, prompts[:1])[0])
        text = written[5 : 5 + stop]
    alone = [answers(text, [prompt])[0] for prompt in prompts]
    assert answers(text, prompts) == alone
    assert (len(alone[0]) < 24) == (stop is not None)


def test_a_tie_is_judged_on_the_scores_that_decide(tmp_path: Path) -> None:
    """With a repetition penalty the target's choice is not the largest logit."""
    models = save_models(tmp_path)
    config = read(
        {
            "target": {"model": models["target"], "dtype": "float32"},
            "generation": {"max_new_tokens": 8, "repetition_penalty": 5.0, "min_new_tokens": 8},
            "drafter": "ngram",
            "questions": {"per_category": 1},
        }
    )
    target = Target.load(models["target"], dtype="float32")
    prompt = target.tokenizer("user: again and again and again")["input_ids"]
    peer = Peer(target, config.generation, Peer.Params())
    right = peer.answer([prompt], 0).token_ids[0]
    logits = target.model(torch.tensor([prompt + right[:-1]])).logits[0, len(prompt) - 1 :]
    place = next(n for n, token in enumerate(right) if int(logits[n].argmax()) != token)
    wrong = [*right[:place], int(logits[place].argmax())]
    question = config.questions[0]
    lines = [
        {
            "row": name, "question": question.id, "temperature": 0.0, "batch_size": 1,
            "turns": [{"token_ids": tokens}],
        }
        for name, tokens in (("transformers", right), ("ngram + svip", wrong))
    ]  # fmt: skip
    (found,) = find_differences(lines, config, target, lambda talk: prompt)
    assert (found["position"], found["tie"]) == (place, False)
    assert found["gap"] > 0.01


def test_the_oracle_drafts_what_is_accepted_and_one_token_more(bench_run: Path) -> None:
    lines = lines_of(bench_run)
    rounds = defaultdict(list)
    for line in lines:
        for turn in line["turns"]:
            rounds[line["method"], line["temperature"]].extend(turn["rounds"])
    for temperature in (0, 1):
        for length, accepted, committed, _ in rounds["autoregressive + oracle", temperature]:
            if committed > accepted:  # the text did not end inside the draft
                assert accepted in (length, length - 1)
        best = max(
            row["tau"]
            for row in summary_of(bench_run)
            if row["method"].startswith("autoregressive + fixed") and row["category"] == "all"
            and row["temperature"] == temperature
        )  # fmt: skip
        oracle = next(
            row
            for row in summary_of(bench_run)
            if row["method"] == "autoregressive + oracle" and row["category"] == "all"
            and row["temperature"] == temperature
        )  # fmt: skip
        assert oracle["mean_draft_length"] < oracle["tau"] + 1
        if temperature == 0:
            assert oracle["tau"] >= best - 1e-9


def test_entropies_are_kept_with_what_became_of_the_token(bench_run: Path) -> None:
    for line in lines_of(bench_run):
        if not line["method"].endswith("+ svip") or line["batch_size"] != 1:
            assert line["entropy"] == []
            continue
        tried = accepted = 0
        for turn in line["turns"]:
            for length, taken, committed, _ in turn["rounds"]:
                accepted += taken
                tried += taken if committed == taken else min(length, taken + 1)
        assert len(line["entropy"]) == tried
        assert sum(hit for _, hit in line["entropy"]) == accepted


def test_an_answer_is_kept_with_its_drafts(bench_run: Path) -> None:
    examples = json.loads((bench_run / "examples.json").read_text())
    assert any("svip" in name for name in examples["rows"])
    assert not any("oracle" in name or "plain" in name for name in examples["rows"])
    texts = {
        "".join("".join(each["accepted"] + each["bonus"]) for each in rounds)
        for rounds in examples["rows"].values()
    }
    assert len(texts) == 1  # greedy: all rows write the same


# --- runs that are cut short, moved, or split -----------------------------------------------------


GRID = """
target: {{model: {target}, dtype: float32}}
questions: {{source: {questions}, categories: [writing, qa, rag]}}
generation: {{max_new_tokens: 12}}
temperature: [0, 1]
rows:
  - {{drafter: ngram, policy: fixed}}
"""


class KilledError(Exception):
    """As if the process had been killed."""


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    config = read(write_grid(tmp_path, GRID))
    count = 0

    def kill_after_some(progress: Progress) -> None:
        nonlocal count
        count += not progress.doing.startswith("warm-up")
        if count > 20:
            raise KilledError

    with pytest.raises(KilledError):
        BenchRun(config, tmp_path / "run", kill_after_some).run()
    before = (tmp_path / "run" / "results.jsonl").read_text()
    assert before.count("\n") == 20
    with (tmp_path / "run" / "results.jsonl").open("a") as file:
        file.write('{"row": "half a li')
    run = BenchRun(config, tmp_path / "run")
    run.run()
    after = (tmp_path / "run" / "results.jsonl").read_text()
    assert after.startswith(before)
    counts = Counter((line["row"], line["question"]) for line in lines_of(tmp_path / "run"))
    assert len(counts) == 6 * 6
    assert set(counts.values()) == {1}
    left: list[Progress] = []
    run.report = left.append
    run.run()  # nothing is left to do
    assert all(progress.doing == "comparing texts" for progress in left)


def test_runs_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_grid(tmp_path, GRID)
    run = BenchRun(read(path, ["questions.per_category=1", "temperature=0"]), tmp_path / "run")
    run.run()
    other = BenchRun(read(path, ["temperature=0"]), tmp_path / "run")
    with pytest.raises(SpecdecError, match=r"other: questions\); results are never mixed"):
        other.run()
    monkeypatch.setattr(store, "code_hash", lambda: "another")
    again = BenchRun(read(path, ["questions.per_category=1", "temperature=0"]), tmp_path / "run")
    with pytest.raises(SpecdecError, match=r"other: code\)"):
        again.run()
    monkeypatch.undo()
    model = tmp_path / "target" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4] + b"\0\0\0\0")
    changed = BenchRun(read(path, ["questions.per_category=1", "temperature=0"]), tmp_path / "run")
    with pytest.raises(SpecdecError, match=r"other: weights\)"):
        changed.run()


def test_a_changed_plugin_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "drafts"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from specdec import hookimpl\n\n@hookimpl\ndef specdec_register_policies(register):\n"
        "    register('short', 'drafts.short:Short')\n"
    )
    (package / "short.py").write_text("LENGTH = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = plugins.Registry()
    monkeypatch.setattr(store, "registry", lambda: registry)
    without = store.code_hash()
    registry.add_listed("drafts", tmp_path)
    before = store.code_hash()
    (package / "short.py").write_text("LENGTH = 4\n")
    assert len({without, before, store.code_hash()}) == 3


def test_two_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    path = write_grid(tmp_path, GRID)
    BenchRun(read(path), tmp_path / "one").run()
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", "0", "-m", "specdec", "bench", str(path), "--out",
        str(tmp_path / "two"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("speed-up over transformers") == 2  # one report, not two

    def texts(folder: Path) -> dict[Any, Any]:
        return {
            (line["row"], line["question"]): [turn["token_ids"] for turn in line["turns"]]
            for line in lines_of(folder)
        }

    assert texts(tmp_path / "two") == texts(tmp_path / "one")
    assert len(lines_of(tmp_path / "two")) == len(lines_of(tmp_path / "one"))
    counted = ("name", "category", "questions", "tau", "alpha", "equal_to_baseline", "loop_share")
    for one, two in zip(summary_of(tmp_path / "one"), summary_of(tmp_path / "two"), strict=True):
        assert {key: one[key] for key in counted} == {key: two[key] for key in counted}


# --- faults that must show ------------------------------------------------------------------------


PLUGIN = """
import time

from specdec import LengthPolicy, hookimpl
from specdec.drafters.autoregressive import AutoregressiveDrafter


class Sleepy(AutoregressiveDrafter):
    summary = "sleeps 5 ms a step"

    def step(self):
        time.sleep(0.005)
        return super().step()


class Cheat(LengthPolicy):
    summary = "changes what the target says while a draft is checked"

    def keep_drafting(self, step):
        if step.depth == 3:
            self.hook = OUTPUT[0].register_forward_hook(lambda layer, args, logits: -logits)
        return step.depth < 3

    def observe(self, outcome):
        if getattr(self, "hook", None):
            self.hook.remove()


OUTPUT = []


@hookimpl
def specdec_register_drafters(register):
    register("sleepy", Sleepy)


@hookimpl
def specdec_register_policies(register):
    register("cheat", Cheat)
"""

FAULTS = """
plugins: [{plugin}]
target: {{model: {target}, dtype: float32}}
questions: {{source: {questions}, per_category: 1}}
generation: {{max_new_tokens: 16}}
rows:
  - drafter: [{{name: sleepy, model: {drafter}}}, {{name: autoregressive, model: {drafter}}}]
    policy: {{name: fixed, length: 4}}
  - {{drafter: {{name: autoregressive, model: {drafter}}}, policy: cheat}}
"""


def test_deliberate_faults_are_caught(tmp_path: Path) -> None:
    plugin = tmp_path / "faults.py"
    plugin.write_text(PLUGIN)
    path = write_grid(tmp_path, FAULTS, plugin=str(plugin))
    run = BenchRun(read(path), tmp_path / "run")
    module = sys.modules[type(run.methods["autoregressive + cheat"].decoder.policy).__module__]
    module.OUTPUT.append(run.target.model.get_output_embeddings())
    rows = {row["method"]: row for row in run.run() if row["category"] == "all"}
    sleepy, awake = rows["sleepy + fixed"], rows["autoregressive + fixed"]
    # The sleep is drafting time, of every step, and the prediction knows it.
    assert sleepy["round_ms"]["draft"] >= 5 * sleepy["mean_draft_length"]
    assert sleepy["c"] > awake["c"]
    assert sleepy["predicted_speedup"] < awake["predicted_speedup"]
    assert sleepy["tau"] == awake["tau"]
    assert "a drafting step costs c = " in sleepy["diagnosis"]
    # A policy that breaks equality is marked, and not excused as a tie.
    assert awake["equal_to_baseline"] is True
    assert rows["autoregressive + cheat"]["equal_to_baseline"] is False
    assert rows["autoregressive + cheat"]["only_ties"] is False


def test_answers_that_loop_are_told_apart() -> None:
    assert is_looping([1, 2, 3, 4] * 30)
    assert not is_looping(list(range(120)))
    assert not is_looping([5, 5])  # too short to tell
    half = list(range(60)) + [1, 2, 3] * 20
    assert is_looping(half)


def test_speed_up_is_given_with_and_without_loops(bench_run: Path) -> None:
    lines = {(line["row"], line["question"]): line for line in lines_of(bench_run)}
    for row in summary_of(bench_run):
        mine = [
            line
            for (name, _), line in lines.items()
            if name == row["name"] and row["category"] in ("all", line["column"])
        ]
        looped = [
            line
            for line in mine
            if line["looping"]
            or lines[
                f"transformers, T={row['temperature']:g}, B={row['batch_size']}", line["question"]
            ]["looping"]
        ]
        assert row["loop_share"] == pytest.approx(statistics.mean(line["looping"] for line in mine))
        assert row["without_loops"]["questions"] == len(mine) - len(looped)
