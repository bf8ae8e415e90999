"""The drafters that come with plugins/specdec-smollm2: they load by name, fit, and are small."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from specdec.check import check_sampling
from specdec.cli.check import BEGINNING
from specdec.decoder import SpeculativeDecoder
from specdec.target import Target
from tests.tiny import llama, noisy

pytest.importorskip("specdec_smollm2", reason="plugins/specdec-smollm2 is not installed")

from specdec_smollm2 import trained
from specdec_smollm2.trained import EMBEDDING, FOLDER, put_together, take_apart

DRAFTERS: dict[str, dict[str, Any]] = {
    "smollm2-135m-ar": {"name": "autoregressive", "model": "smollm2-135m-ar"},
    "smollm2-135m-eagle2": {
        "name": "eagle2", "checkpoint": "smollm2-135m-eagle2", "chain": True, "depth": 2,
    },
    "smollm2-135m-glide": {"name": "glide", "checkpoint": "smollm2-135m-glide"},
}  # fmt: skip
RECIPES = Path(__file__).parents[1] / "plugins/specdec-smollm2/recipes"
names = pytest.mark.parametrize("name", DRAFTERS)
MEGABYTES = {"smollm2-135m-ar": 20, "smollm2-135m-eagle2": 12, "smollm2-135m-glide": 12}


@names
def test_weights_are_bfloat16_and_small(name: str) -> None:
    with safe_open(FOLDER / name / "model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
    assert sum(path.stat().st_size for path in (FOLDER / name).iterdir()) < MEGABYTES[name] * 1e6
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 40e6


@names
def test_each_has_a_card_and_the_configuration_that_made_it(name: str) -> None:
    from specdec.training.settings import read_settings
    from specdec.training.trainer import TrainConfig, check_drafter

    card = (FOLDER / name / "README.md").read_text()
    for part in ("Apache-2.0", "specdec train", "τ"):
        assert part in card
    kind = name.removeprefix("smollm2-135m-")
    recipes = [RECIPES / stage / f"{kind}.yaml" for stage in ("first", "second", "third", "fourth")]
    recipes = [recipe for recipe in recipes if recipe.exists()]
    names = {f"training-{recipe.parent.name}.yaml" for recipe in recipes}
    assert {path.name for path in (FOLDER / name).glob("training*.yaml")} == names
    begun_with = None
    for recipe in recipes:
        made = FOLDER / name / f"training-{recipe.parent.name}.yaml"
        assert made.name in card
        config = read_settings(TrainConfig, made, [], check_drafter)
        assert config.drafter.name == DRAFTERS[name]["name"]
        assert config.init_from == begun_with
        begun_with = f"{config.out}/drafter"
        assert made.read_text() == recipe.read_text()


def test_an_embedding_that_was_taken_out_is_put_back(tmp_path: Path) -> None:
    """Transformers reads from what was put together exactly what was saved."""
    target = llama(seed=1, tie_word_embeddings=True)
    drafter = noisy(target, 0.1)
    drafter.set_input_embeddings(target.get_input_embeddings())
    drafter.tie_weights()
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "draft_vocab.json").write_text("[3, 5]")

    take_apart(tmp_path / "drafter", tmp_path / "packaged")
    with safe_open(tmp_path / "packaged" / "model.safetensors", "pt") as file:
        assert EMBEDDING not in file.keys()  # noqa: SIM118
    (tmp_path / "whole").mkdir()
    put_together(tmp_path / "packaged", tmp_path / "target", tmp_path / "whole")
    assert (tmp_path / "whole" / "draft_vocab.json").read_text() == "[3, 5]"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    ids = torch.tensor([[3, 9, 4, 1]])
    assert torch.equal(loaded(ids).logits, drafter(ids).logits)


@pytest.fixture(scope="module")
def target(smollm2_path: Path) -> Target:
    return Target.load(str(smollm2_path), dtype="float32")


@names
def test_each_drafts_for_its_target(
    name: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "cache_folder", lambda: tmp_path)
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name the seven colours of the rainbow."}],
        add_generation_prompt=True,
    )["input_ids"]
    decoder = SpeculativeDecoder(target, DRAFTERS[name], {"name": "fixed", "length": 3})
    output = decoder.generate(prompt, max_new_tokens=32)
    assert output.statistics.tau > 1.2
    ids = torch.tensor([prompt])
    written = target.model.generate(ids, do_sample=False, max_new_tokens=32)
    assert output.token_ids[0] == written[0, len(prompt) :].tolist()
    sampled = check_sampling(decoder, target.tokenizer(BEGINNING)["input_ids"])
    assert sampled.passed
    assert sampled.drafted
