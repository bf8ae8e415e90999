"""The target's decoder layers, from which drafters begin."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from specdec.errors import SpecdecError
from specdec.target import Target


def decoder_layers(target: Target) -> nn.ModuleList:
    """The list of the target's decoder layers, whatever the architecture calls it."""
    return decoder_layers_of(target.model)


def decoder_layers_of(model: PreTrainedModel) -> nn.ModuleList:
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise SpecdecError(f"found no list of {depth} decoder layers in {type(model).__name__}")
