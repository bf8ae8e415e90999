"""`specdec eval-drafter`: its figures against counts made here, and what it leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdec.bench.questions import Question, QuestionSettings, load_questions
from specdec.cli import make_app
from specdec.decoder import GenerationOutput, SpeculativeDecoder
from specdec.errors import SpecdecError
from specdec.evaluation import evaluate, take
from specdec.generation import GenerationSettings
from tests.bench_models import save_models, write_questions


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions") / "questions.jsonl")


def make_decoder(models: dict[str, str], drafter: str, **settings: Any) -> SpeculativeDecoder:
    # Sampled, because the greedy texts of a random model loop.
    chosen = GenerationSettings.model_validate(
        {"max_new_tokens": 40, "temperature": 1.0, "eos_token_id": [], **settings}
    )
    return SpeculativeDecoder(
        models["target"],
        {"name": "autoregressive", "model": models[drafter]},
        {"name": "fixed", "length": 3},
        settings=chosen,
        seed=0,
    )


class Spy(SpeculativeDecoder):
    """Remembers what it was asked and what it wrote."""

    def generate(self, prompt: Any, **arguments: Any) -> GenerationOutput:
        output = super().generate(prompt, **arguments)
        self.seen = [*getattr(self, "seen", ()), output]
        return output


def spying(decoder: SpeculativeDecoder) -> Spy:
    decoder.__class__ = Spy
    assert isinstance(decoder, Spy)
    return decoder


def count(outputs: Sequence[GenerationOutput]) -> tuple[float, list[float]]:
    """τ, and the share of rounds in which each position was accepted, from the records alone.

    In the last round of a text, which is cut, nothing is judged behind the cut.
    """
    rounds = [record for output in outputs for record in output.rounds]
    committed = sum(record.committed[0] for record in rounds)
    whole = [record for record in rounds if record.committed[0] > record.accepted[0]]
    by_position = [
        sum(record.accepted[0] > position for record in whole)
        / sum(record.draft_length[0] > position for record in whole)
        for position in range(3)
    ]
    return committed / len(rounds), by_position


def test_figures_are_those_of_the_rounds(models: dict[str, str], questions: Path) -> None:
    decoder = spying(make_decoder(models, "drafter"))
    asked = load_questions(QuestionSettings(source=str(questions)))
    found = evaluate(decoder, asked)
    answers = decoder.seen[1:]  # the first is the warm-up
    assert len(answers) == 4 * 2 + 4
    assert found.looping == 0
    score = found.overall
    tau, by_position = count(answers)
    assert 1.5 < tau < 4, "the drafter is right now and then"
    assert score.tau == pytest.approx(tau)
    assert score.alpha_by_position == pytest.approx(by_position, abs=0.02)
    assert score.tokens == sum(len(answer.token_ids[0]) - 1 for answer in answers)
    assert score.predicted_speedup == pytest.approx(score.tau / (score.draft_length * score.c + 1))
    assert score.c > 0
    assert score.check > 0
    assert list(found.by_category) == ["MT-Bench", "qa", "rag"]
    assert found.by_category["MT-Bench"].answers == 8
    weights = [score.tokens / score.tau for score in found.by_category.values()]
    taus = [score.tau for score in found.by_category.values()]
    pooled = sum(tau * weight for tau, weight in zip(taus, weights, strict=True)) / sum(weights)
    assert pooled == pytest.approx(score.tau)


def test_the_target_as_its_own_drafter_is_always_right(
    models: dict[str, str], questions: Path
) -> None:
    decoder = make_decoder(models, "target")
    asked = take(load_questions(QuestionSettings(source=str(questions))), 1)
    score = evaluate(decoder, asked).overall
    assert score.alpha == 1
    assert score.alpha_by_position == [1, 1, 1]
    assert score.tau == pytest.approx(39 / 10)  # nine rounds of four tokens, one of three


def test_a_second_turn_follows_the_first_answer(models: dict[str, str]) -> None:
    decoder = spying(make_decoder(models, "target"))
    evaluate(decoder, [Question("1", "writing", ("What?", "Why?"))])
    _, first, second = decoder.seen
    text = decoder.tokenizer.decode(second.prompts[0])
    assert text.startswith("user: What?\nassistant: ")
    assert text.endswith("user: Why?\nassistant: ")
    assert first.text in text


def test_answers_that_loop_are_left_out(models: dict[str, str], questions: Path) -> None:
    asked = take(load_questions(QuestionSettings(source=str(questions))), 2)
    decoder = make_decoder(models, "target", max_new_tokens=60)
    calm = evaluate(decoder, asked)
    # An answer of one token over and over: the other tokens are never written.
    one_word = list(range(1, decoder.target.vocab_size))
    decoder.settings = decoder.settings.model_copy(update={"suppress_tokens": one_word})
    with pytest.raises(SpecdecError, match="of 8 answers 8 repeat themselves"):
        evaluate(decoder, asked)
    assert calm.overall.answers == 8


def test_limit_takes_so_many_of_each_category(questions: Path) -> None:
    asked = load_questions(QuestionSettings(source=str(questions)))
    assert [question.column for question in take(asked, 1)] == ["MT-Bench", "qa", "rag"]
    two = [question.category for question in take(asked, 2)]
    assert sorted(two) == ["coding", "qa", "qa", "rag", "rag", "writing"]
    assert take(asked, None) == asked


def test_the_command_prints_one_object(models: dict[str, str], questions: Path) -> None:
    arguments = [
        "eval-drafter", "--data", str(questions), "--limit", "1", "--json",
        "--set", f"target={models['target']}", "--set", "drafter.name=autoregressive",
        "--set", f"drafter.model={models['drafter']}", "--set", "policy=fixed",
        "--set", "generation.temperature=1", "--set", "generation.max_new_tokens=20",
        "--set", "seed=0",
    ]  # fmt: skip
    done = CliRunner().invoke(make_app(), arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"tau", "alpha_by_position", "c", "predicted_speedup"} <= found.keys()
    assert found["questions"] == 3
    assert set(found["by_category"]) == {"MT-Bench", "qa", "rag"}
    assert {"tau", "alpha_by_position", "c", "predicted_speedup"} <= found["by_category"][
        "qa"
    ].keys()

    done = CliRunner().invoke(make_app(), [name for name in arguments if name != "--json"])
    assert done.exit_code == 0, done.output
    assert f"{found['tau']:.2f}" in done.stdout
    assert "accepted by position" in done.stdout


def test_without_a_drafter_there_is_nothing_to_evaluate(models: dict[str, str]) -> None:
    decoder = SpeculativeDecoder(models["target"])
    with pytest.raises(SpecdecError, match="there is none to evaluate"):
        evaluate(decoder, [Question("1", "qa", ("What?",))])
