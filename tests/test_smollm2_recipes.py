"""The prompts that the recipe of the SmolLM2 pack makes from public texts."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from specdec.training.prompts import load_prompts

RECIPE = Path(__file__).parents[1] / "plugins/specdec-smollm2/recipes/prompts.py"

SENTENCE = "The quick brown foxes of {} number {} ran over the hill and came home before the rain."


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe, its sources replaced by small files that are there already."""
    spec = importlib.util.spec_from_file_location("prompts", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    german = [f"Die {n} Füchse liefen über den Hügel und kamen heim." for n in range(12)]
    english = [SENTENCE.format(place, n) for place in ("Norway", "Peru") for n in range(60)]
    questions = [json.dumps({"question": f"how many foxes ran in peru {n}"}) for n in range(6)]
    for name, texts in {
        "GERMAN": german, "ENGLISH": english, "QUESTIONS": questions, "PROBLEMS": questions,
    }.items():  # fmt: skip
        data = "\n".join(texts).encode()
        (tmp_path / f"owner+{name}").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()[:16]
        monkeypatch.setattr(module, name, {f"owner/{name}": digest})
    counts = {"translation": 10, "summary": 3, "passages": 2, "question": 9, "sum": 4}
    monkeypatch.setattr(module, "COUNTS", counts)
    return module


def test_prompts_of_every_kind(recipe: ModuleType, tmp_path: Path) -> None:
    recipe.main(tmp_path)
    short, long = (load_prompts(str(tmp_path / f"{name}.jsonl")) for name in ("short", "long"))
    assert len(short) == 10 + 4 + 4  # four questions are left: two go with passages
    assert len(long) == 3 + 2
    assert min(len(turns[0]) for turns in long) > 1000 > max(len(turns[0]) for turns in short)
    found = [turns[0].splitlines() for turns in long if turns[0].endswith("?")]
    passages, question = found[0][:-1], found[0][-1]
    assert question.startswith("How many foxes ran in peru")
    assert len(passages) == recipe.PASSAGES
    assert all("Peru" in passage for passage in passages)
    before = (tmp_path / "long.jsonl").read_bytes()
    recipe.main(tmp_path)
    assert (tmp_path / "long.jsonl").read_bytes() == before


def test_another_file_is_refused(recipe: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "owner+GERMAN").write_text("Something else.")
    with pytest.raises(SystemExit, match=r"owner\+GERMAN is not the file that this recipe"):
        recipe.main(tmp_path)
