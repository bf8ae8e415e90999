"""GliDe against numbers of the official code, for every config in the folder of golden data.

The folder is the one that SPECDEC_GOLDEN names, `tests/golden` by default.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.drafters.glide import GlideModel, block_mask, causal_mask

ROOT = Path(os.environ.get("SPECDEC_GOLDEN", Path(__file__).parent / "golden"))
CONFIGS = sorted(path.parent.parent for path in ROOT.rglob("glide/config.json"))
configs = pytest.mark.parametrize("folder", CONFIGS, ids=lambda folder: folder.name)


def test_golden_data_is_there() -> None:
    assert CONFIGS, f"no GliDe configs under {ROOT}"


@configs
def test_training_forward(folder: Path) -> None:
    target = load_target(folder)
    model = GlideModel.from_pretrained(folder / "glide", target)
    golden = load_file(folder / "logits.safetensors")
    ids = golden["train.ids"]
    length = ids.shape[1]
    with torch.no_grad():
        cache = target(ids, use_cache=True).past_key_values
        keys_values = [(cache.layers[i].keys, cache.layers[i].values) for i in model.target_layers]
        positions = torch.arange(length).expand_as(ids)
        mask = block_mask(length, model.config.block_size)
        hidden = model(ids, positions, keys_values, causal_mask(length), mask)
        logits = model.output(hidden)
    expected = golden["train.block_masked_logits"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def load_target(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()


def load_golden(folder: Path) -> dict:
    return json.loads((folder / "golden.json").read_text())
