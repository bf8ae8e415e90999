"""Training drafters: what is learnt is what is drafted with, resuming, processes, faults."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specdec.cli import make_app
from specdec.decoder import SpeculativeDecoder
from specdec.errors import SpecdecError
from specdec.plugins import make_drafter
from specdec.target import Target
from specdec.training.data import DataSynthesis
from specdec.training.features import FeatureStore
from specdec.training.files import read_jsonl, read_rows
from specdec.training.recipe import Batch, block_efficiency, chains_of
from specdec.training.sequences import Text, batches, frequent_tokens, load_texts, split
from specdec.training.trainer import TrainConfig, Trainer
from tests.training import data_config, make_chat_model

KINDS = {
    "eagle2": {"steps": 3},
    "glide": {"block_size": 4},
    "autoregressive": {"layers": [1]},
}
CHECKPOINT = {"eagle2": "checkpoint", "glide": "checkpoint", "autoregressive": "model"}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def data(folder: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    config = data_config(folder, path, answer_tokens=500, greedy_share=0.7, shard_size=20)
    DataSynthesis(target, config).run()
    return path


def train_config(folder: Path, data: Path, out: Path, kind: str, **changes: Any) -> TrainConfig:
    defaults = {
        "target": {"model": str(folder), "dtype": "float32"}, "data": [data], "out": out,
        "drafter": {"name": kind, **KINDS[kind]}, "draft_vocab": None, "held_out": 0.2,
        "epochs": 3, "batch_tokens": 300, "learning_rate": 3e-3, "precision": "no",
        "log_steps": 2, "checkpoint_steps": 4,
    }  # fmt: skip
    return TrainConfig.model_validate({**defaults, **changes})


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run without what the clock decides."""
    timed = ("minutes", "tokens_per_s")
    return [
        {key: value for key, value in row.items() if key not in timed}
        for row in read_jsonl(out / "metrics.jsonl")
    ]


# --- what is trained is what is used -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        ("glide", {"layers": 2, "target_layers": [1, 1], "intermediate_size": 24}),
    ],
)
def test_a_trained_drafter_drafts_what_training_saw(
    kind: str, options: dict[str, Any], folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    """The chains of the training forward against the rounds of the decoder, token by token."""
    config = train_config(
        folder, data, tmp_path, kind, epochs=60, held_out=0.0, checkpoint_steps=10**6,
        learning_rate=6e-3, drafter={"name": kind, **KINDS[kind], **options},
    )  # fmt: skip
    trainer = Trainer(config, target)
    where = trainer.run()
    depth = config.drafter.block_size if kind == "glide" else 5
    drafters = {
        "eagle2": {"name": "eagle2", "checkpoint": str(where), "chain": True, "depth": depth - 1},
        "glide": {"name": "glide", "checkpoint": str(where)},
        "autoregressive": {"name": "autoregressive", "model": str(where)},
    }
    policy = {"name": "fixed", "length": depth}
    decoder = SpeculativeDecoder(target, drafters[kind], policy)
    accepted_at_all = 0
    for index, text in enumerate(trainer.texts):
        start, end = text.answers[0]
        if not text.greedy or end - start < 2 * depth:
            continue
        written = decoder.generate([text.ids[:start]], max_new_tokens=end - start, temperature=0.0)
        assert written.token_ids[0] == text.ids[start:end]
        root, rounds = start, {}
        for record in written.rounds:
            rounds[root] = record.accepted[0]
            root += record.accepted[0] + 1
        for root, accepted in rounds.items():
            if root + depth < end - 1:
                expected = _accepted_in_training(trainer, index, root, depth)
                assert accepted == expected, f"{text.name}, root {root}"
                accepted_at_all += accepted
    assert accepted_at_all > 10, "the drafter has learnt something that can be compared"


def _accepted_in_training(trainer: Trainer, index: int, root: int, depth: int) -> int:
    """How many tokens of a draft from `root` the training forward takes for right.

    Only the positions behind the root are trained on, and for GliDe the text is put so that a block
    begins there: what is left of its begin is what a draft from there sees.
    """
    text = trainer.texts[index]
    states = trainer.states[index]
    batch = Batch.of([text], [states])
    batch.trained[:] = False
    batch.trained[0, root : root + depth] = True
    if trainer.config.drafter.name == "glide":
        return _accepted_by_glide(trainer, batch, root, depth)
    with torch.no_grad():
        outcome = trainer.recipe(batch, None)
    return int(outcome.chains.int().cumprod(1).sum())


def _accepted_by_glide(trainer: Trainer, batch: Batch, root: int, depth: int) -> int:
    """Blocks begin at multiples of their size; a block size of `root` makes one begin at the root.

    What the tokens before it read of the target counts in the second layer: that the text reads all
    that came before, as in blocks of one token.
    """
    params = trainer.recipe.params
    trainer.recipe.params = params.model_copy(update={"block_size": root})

    def mask(length: int, size: int, device: torch.device, offset: int) -> torch.Tensor:
        tokens = torch.arange(length)
        ends = torch.where(tokens < size, tokens, size)
        return (tokens < ends[:, None])[None]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if params.layers > 1:
            patch.setattr("specdec.training.glide.block_mask", mask)
        outcome = trainer.recipe(batch, None)
    trainer.recipe.params = params
    right = outcome.agreed[:depth].int() if root >= depth else None
    assert right is not None
    assert outcome.count[:depth].tolist() == [1] * depth
    return int(right.cumprod(0).sum())


def test_states_equal_transformers(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    texts = load_texts([data], max_length=200)
    memory = FeatureStore(target, texts, layers=[1], batch_tokens=150)
    disk = FeatureStore(target, texts, layers=[1], folder=tmp_path, batch_tokens=150)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for index in range(0, len(texts), 5):
        text, states = texts[index], memory[index]
        with torch.no_grad():
            done = model(torch.tensor([text.ids]), output_hidden_states=True, use_cache=True)
        torch.testing.assert_close(states.features, done.hidden_states[-1][0])
        logits = done.logits[0, text.trained]
        torch.testing.assert_close(states.norm[text.trained], logits.logsumexp(-1))
        assert states.best[text.trained].tolist() == logits.argmax(-1).tolist()
        keys, values = states.layers[1]
        torch.testing.assert_close(keys, done.past_key_values.layers[1].keys[0])
        torch.testing.assert_close(values, done.past_key_values.layers[1].values[0])
        kept = disk[index]
        assert torch.equal(kept.features, states.features)
        assert torch.equal(kept.layers[1][0], keys)


def test_turns_of_one_conversation_are_one_text(data: Path) -> None:
    texts = load_texts([data], max_length=200)
    rows = list(read_rows(data))
    assert len(texts) == len({row["id"][:-2] for row in rows}) < len(rows)
    for row in rows:
        text = next(text for text in texts if text.name == row["id"][:-2])
        start, end = text.answers[row["turn"]]
        assert text.ids[:start] == row["prompt_ids"]
        assert text.ids[start:end] == row["answer_ids"][: end - start]
        assert end - start >= len(row["answer_ids"]) - 1  # its stop token may be another one


@pytest.mark.filterwarnings("error")
def test_what_is_behind_the_longest_length_is_cut_and_counted(data: Path) -> None:
    rows = list(read_rows(data))
    behind = [
        sum(place >= 30 for place in range(len(row["prompt_ids"]), length))
        for row in rows
        if (length := len(row["prompt_ids"]) + len(row["answer_ids"])) > 30
    ]
    load_texts([data], max_length=200)
    with pytest.warns(UserWarning, match=rf"max_length 30 cuts off {sum(behind)} tokens") as seen:
        texts = load_texts([data], max_length=30)
    assert max(len(text.ids) for text in texts) == 30
    whole = len({row["id"][:-2] for row in rows})
    assert f"leaves out {whole - len(texts)} of {whole} conversations" in str(seen[0].message)


def test_chains_and_block_efficiency() -> None:
    trained = torch.tensor([[0, 1, 1, 1, 1, 0]]).bool()
    agreed = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]]).bool()
    # Roots 1 to 3: one step ahead at the root, two steps ahead at the next position.
    assert chains_of(agreed, trained).tolist() == [[True, True], [False, False], [True, True]]
    chains = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 1], [1, 1], [0, 0]]).bool()
    # Rounds at 0 (two accepted), 3 (none), 4 (two): six roots in three rounds.
    assert block_efficiency(chains) == 2.0


def test_batches_hold_every_text_once() -> None:
    lengths = [5, 90, 17, 33, 8, 60, 61, 12]
    made = batches(lengths, 100, "seed")
    assert sorted(index for batch in made for index in batch) == list(range(len(lengths)))
    assert all(max(lengths[i] for i in batch) * len(batch) <= 100 for batch in made)
    assert made == batches(lengths, 100, "seed") != batches(lengths, 100, "other")


def test_frequent_tokens_and_the_split() -> None:
    texts = [Text(f"{n}", "open", [9, 9, 5, 7 + n % 2, 5], ((2, 5),), True) for n in range(400)]
    assert frequent_tokens(texts, 2) == [5, 7]
    assert frequent_tokens(texts, 5) == [0, 1, 5, 7, 8]
    train, held_out = split(texts, 0.1)
    assert 20 < len(held_out) < 60
    assert {text.name for text in train}.isdisjoint(text.name for text in held_out)


# --- runs ----------------------------------------------------------------------------------------


@kinds
def test_training_lowers_the_loss(
    kind: str, folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    config = train_config(folder, data, tmp_path, kind, epochs=6, precision="bf16", draft_vocab=40)
    where = Trainer(config, target).run()
    lines = metrics(tmp_path)
    held_out = [line for line in lines if line.get("held_out")]
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    assert held_out[-1]["tau"] >= 1.0
    ids = json.loads((where / "draft_vocab.json").read_text())
    assert len(ids) == 40
    drafter = make_drafter({"name": kind, CHECKPOINT[kind]: str(where)})
    assert drafter is not None
    drafter.attach(target)
    assert drafter.vocabulary.ids.tolist() == ids


def test_a_killed_run_goes_on_exactly(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    # Lines of metrics do not end where checkpoints do.
    whole = train_config(folder, data, tmp_path / "whole", "eagle2", log_steps=3)
    Trainer(whole, target).run()

    killed = whole.model_copy(update={"out": tmp_path / "killed"})
    script = """
import os, signal, sys
from specdec.target import Target
from specdec.training.trainer import TrainConfig, Trainer

def kill(now):
    if now.values.get("step") == 9:
        os.kill(os.getpid(), signal.SIGKILL)

config = TrainConfig.model_validate_json(sys.argv[1])
Trainer(config, Target.load(config.target.model, dtype="float32"), kill).run()
"""
    command = [sys.executable, "-c", script, killed.model_dump_json()]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert [line["step"] for line in metrics(killed.out)][-1] == 9
    assert not (killed.out / "drafter").exists()
    Trainer(killed, target).run()
    assert metrics(killed.out) == metrics(whole.out)
    name = "drafter/model.safetensors"
    assert (killed.out / name).read_bytes() == (whole.out / name).read_bytes()


def test_a_run_that_is_over_ends_at_once(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    config = train_config(folder, data, tmp_path, "eagle2", epochs=10**6, max_minutes=0.02)
    Trainer(config, target).run()
    lines = metrics(tmp_path)
    assert (tmp_path / "drafter" / "model.safetensors").exists()
    Trainer(config, target).run()
    assert metrics(tmp_path) == lines
    # Its last step was logged and evaluated, once.
    last = [line for line in lines if line["step"] == lines[-1]["step"]]
    assert [line.get("held_out", False) for line in last] == [False, True]


def test_a_line_that_a_kill_cut_is_dropped(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    """Also before the first checkpoint."""
    config = train_config(folder, data, tmp_path, "eagle2", epochs=1)
    trainer = Trainer(config, target)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 4, "lo')
    trainer.run()
    steps = [line["step"] for line in metrics(tmp_path) if not line.get("held_out")]
    assert steps == sorted(set(steps))


def test_another_number_of_processes_is_refused(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    config = train_config(folder, data, tmp_path, "eagle2", epochs=1)
    Trainer(config, target).run()
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(SpecdecError, match="processes: 2 there, 1 now"):
        Trainer(config, target)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (
            {"name": "autoregressive", "layers": [0], "intermediate_size": 49},
            r"drafter.intermediate_size: the target's MLPs have 48 neurons \(found 49\)",
        ),
        ({"name": "autoregressive", "layers": [2]}, "has layers 0 to 1"),
        ({"name": "glide", "layers": 3}, r"the target has 2 layers to read \(found 3\)"),
        (
            {"name": "glide", "target_layers": [2]},
            r"1 layers onto the target's layers \[2\] \(which has 2\)",
        ),
    ],
)
def test_options_that_do_not_fit_the_target_say_so(
    drafter: dict[str, Any], message: str,
    folder: Path, data: Path, target: Target, tmp_path: Path,
) -> None:  # fmt: skip
    config = train_config(folder, data, tmp_path, str(drafter["name"]), drafter=drafter)
    with pytest.raises(SpecdecError, match=message):
        Trainer(config, target)


def test_two_processes_train_as_one_with_twice_the_batches(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    one = train_config(folder, data, tmp_path / "one", "eagle2", accumulation=2)
    one = one.model_copy(update={"drafter": one.drafter.model_copy(update={"noise": 0.0})})
    Trainer(one, target).run()

    two = one.model_copy(update={"accumulation": 1, "out": tmp_path / "two"})
    path = tmp_path / "two.yaml"
    path.write_text(two.model_dump_json())  # JSON is YAML
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--main_process_port", "0", "-m", "specdec", "train", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str(two.out / "drafter")
    ours, theirs = metrics(two.out), metrics(one.out)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_glide_learns_a_text_with_blocks_that_begin_elsewhere_each_time(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    trainer = Trainer(train_config(folder, data, tmp_path, "glide"), target)
    text, size = trainer.texts[0], 4
    batch = Batch.of([text], [trainer.states[0]])
    torch.manual_seed(0)
    for name, weight in trainer.recipe.named_parameters():
        if name.endswith("cross_attn.o_proj.weight"):  # at first what it reads adds nothing
            weight.data.normal_()
    places = [[(token + offset) % size for token in text.trained] for offset in range(size)]
    counts = [[row.count(place) for place in range(size)] for row in places]
    losses = set()
    with torch.no_grad():
        for seed in range(40):
            outcome = trainer.recipe(batch, seed)
            assert outcome.count.tolist() in counts
            losses.add(round(outcome.loss.item(), 3))
        evaluated = trainer.recipe(batch, None)
    assert len(losses) == size, "the target's keys end elsewhere with every offset"
    assert round(evaluated.loss.item(), 3) in losses
    assert evaluated.count.tolist() == counts[0]


def test_glide_begins_as_the_first_layers_of_the_target(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    every = {"name": "glide", "layers": 2}
    trainer = Trainer(train_config(folder, data, tmp_path, "glide", drafter=every), target)
    outcome = trainer.recipe(trainer._batch([0, 1]), None)
    assert torch.equal(outcome.agreed, outcome.count)


@kinds
def test_a_run_begins_with_the_weights_of_an_earlier_one(
    kind: str, folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    first = Trainer(train_config(folder, data, tmp_path / "a", kind, epochs=1), target).run()
    changes = {"init_from": str(first), "learning_rate": 1e-12, "weight_decay": 0, "epochs": 1}
    second = Trainer(train_config(folder, data, tmp_path / "b", kind, **changes), target).run()
    before, after = (load_file(path / "model.safetensors") for path in (first, second))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("glide", {}, r"init_from: .*a/drafter is not a drafter like .*: it has fc.bias"),
        ("eagle2", {"layers": 2}, r"is not a drafter like the one .*: it has no layers.1"),
    ],
)
def test_another_drafter_to_begin_with_is_refused(
    kind: str, options: dict[str, Any], message: str,
    folder: Path, data: Path, target: Target, tmp_path: Path,
) -> None:  # fmt: skip
    other = Trainer(train_config(folder, data, tmp_path / "a", "eagle2", epochs=1), target).run()
    changes = {"init_from": str(other), "drafter": {"name": kind, **options}}
    with pytest.raises(SpecdecError, match=message):
        Trainer(train_config(folder, data, tmp_path / "b", kind, **changes), target).run()


def test_command(folder: Path, data: Path, tmp_path: Path) -> None:
    config = train_config(folder, data, tmp_path / "out", "glide")
    path = tmp_path / "train.yaml"
    path.write_text(config.model_dump_json())
    arguments = ["train", str(path), "--set", "epochs=1", "--max-minutes", "1"]
    done = CliRunner().invoke(make_app(), arguments)
    assert done.exit_code == 0, done.output
    assert "held out: loss" in done.stderr
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SpecdecError, match=r"block_sise: unknown key. Did you mean 'block_size'"):
        CliRunner().invoke(
            make_app(), [*arguments, "--set", "drafter.block_sise=3"], catch_exceptions=False
        )


# --- faults --------------------------------------------------------------------------------------


def test_a_folder_without_data_says_so(folder: Path, target: Target, tmp_path: Path) -> None:
    config = train_config(folder, tmp_path / "nothing", tmp_path / "out", "eagle2")
    with pytest.raises(SpecdecError, match=r"no training data in .*nothing.*specdec data"):
        Trainer(config, target)


def test_data_of_another_target_is_refused(data: Path, tmp_path: Path) -> None:
    other = make_chat_model(tmp_path / "other", seed=1)
    config = train_config(other, data, tmp_path / "out", "eagle2")
    with pytest.raises(SpecdecError, match="made with another target"):
        Trainer(config, Target.load(str(other), dtype="float32"))


def test_another_configuration_in_the_folder_is_refused(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    Trainer(train_config(folder, data, tmp_path, "eagle2", epochs=1), target).run()
    with pytest.raises(SpecdecError, match=r"learning_rate: 0.003 there, 0.1 now"):
        Trainer(train_config(folder, data, tmp_path, "eagle2", epochs=1, learning_rate=0.1), target)


def test_data_that_grew_is_refused(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    """A run that goes on must give what it would have given."""
    growing = shutil.copytree(data, tmp_path / "data")
    config = train_config(folder, growing, tmp_path / "out", "eagle2", epochs=1)
    Trainer(config, target).run()
    last = sorted(growing.glob("shard-?????.jsonl"))[-1]
    following = growing / f"shard-{int(last.stem[-5:]) + 1:05d}.jsonl"
    following.write_text(last.read_text().replace('"id": "0-', '"id": "1-'))
    with pytest.raises(SpecdecError, match=r"another configuration \(texts: '\d+ \("):
        Trainer(config, target)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(
    folder: Path, data: Path, target: Target, tmp_path: Path
) -> None:
    def spoil(now: Any) -> None:
        if now.values.get("step") == 6:
            next(trainer.recipe.parameters()).data.fill_(float("nan"))

    config = train_config(folder, data, tmp_path, "eagle2")
    trainer = Trainer(config, target, spoil)
    with pytest.raises(SpecdecError, match="step 7: the loss or its gradient is not a finite"):
        trainer.run()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 4
    assert all(weight.isfinite().all() for weight in state["drafter"].values())


def test_a_full_disk_ends_the_run_with_one_message(
    folder: Path, data: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(train_config(folder, data, tmp_path, "eagle2"), target)

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(SpecdecError, match=r"checkpoint.pt: No space left on device"):
        trainer.run()
