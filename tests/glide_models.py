"""GliDe models with random weights, in the official layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.drafters.glide import GlideConfig, GlideModel


def untrained_glide(
    folder: Path, target: PreTrainedModel, own_vocabulary: bool = True, **keys: Any
) -> Path:
    """Save a GliDe model with random weights, made for `target`, and return its folder.

    Args:
        own_vocabulary: with an embedding and an output layer of its own, and smaller than the
            target; otherwise it has the target's sizes and shares the target's.
        **keys: official configuration keys.
    """
    torch.manual_seed(1)
    small = {
        "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    shared = {
        "embedding": target.get_input_embeddings(), "output": target.get_output_embeddings()
    }  # fmt: skip
    config = GlideConfig.for_target(target, **((small if own_vocabulary else {}) | keys))
    model = GlideModel(config, target, **({} if own_vocabulary else shared))
    for layer in model.model.layers:
        # A random cross-attention is faint next to the embedding; it has to be felt.
        layer.cross_attn.o_proj.weight.data *= 5
    if own_vocabulary:
        model.lm_head.weight.data *= 5
    model.save_pretrained(folder)
    return folder
