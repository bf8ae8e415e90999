"""What training asks of the target's architecture: its decoder layers, and a plain output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.cache import SlotCache
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


def check_output_layer(target: Target) -> None:
    """Refuse a target that changes what its output layer gives, as Cohere's and Granite's scales and
    Gemma 2's cap do: drafters are trained through the output layer alone.

    Raises:
        SpecdecError: it is such a target.
    """
    first = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    done = target.forward(first, SlotCache(1), [0], features=True)
    assert done.features is not None
    with torch.no_grad():
        plain = target.model.get_output_embeddings()(done.features).float()
    logits = done.logits.float()
    if not torch.allclose(logits, plain, rtol=0.02, atol=0.02 * float(plain.abs().max())):
        raise SpecdecError(
            f"{type(target.model).__name__} scales or caps its logits behind the output layer, which "
            "training does not do yet: the drafter would learn another distribution"
        )


def narrow(state: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The `size` neurons of a gated MLP with the largest weights."""
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    if any(name not in state for name in names):
        raise SpecdecError(
            "drafter.intermediate_size: the target has no MLPs with gate, up and down"
        )
    gate, up, down = (state[name] for name in names)
    if size > len(gate):
        raise SpecdecError(
            f"drafter.intermediate_size: the target's MLPs have {len(gate)} neurons (found {size})"
        )
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = strength.topk(size).indices.sort().values
    return state | dict(zip(names, (gate[kept], up[kept], down[:, kept]), strict=True))
