"""Training GliDe: next tokens from its own text and from the target's keys and values."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from specdec.drafters.glide import GlideConfig, GlideModel, block_mask, causal_mask, check_fits
from specdec.errors import SpecdecError
from specdec.params import Params as ParamsBase
from specdec.target import Target
from specdec.training.layers import decoder_layers, narrow
from specdec.training.losses import Distance, Distilled, OutputRows, distill
from specdec.training.recipe import Batch, Outcome, Recipe


class GlideRecipe(Recipe):
    """Source: GliDe (arXiv 2402.02082), with its block-wise mask; distilled, as its text is the
    target's own.

    The place of a token in its block says how far back the target's keys end: what the first token
    of a block sees is what a draft's first token sees, and so on. Blocks begin elsewhere each time a
    text is trained on, so that a token is learnt at all places. The model has the target's embedding
    and output layer.
    """

    class Params(ParamsBase):
        name: Literal["glide"]
        layers: int = Field(1, ge=1, description="layers, each onto one of the target's")
        target_layers: list[int] | None = Field(
            None,
            description="which of the target's layers each one reads; by default its last ones",
        )
        intermediate_size: int | None = Field(
            None, ge=1, description="neurons of each MLP (begun with the target's strongest ones)"
        )
        block_size: int = Field(5, ge=1, description="tokens of a block: longest draft trained for")
        by: Distance = Field("kl", description="distance of the distributions: kl or tv")
        start: Literal["target", "random"] = Field(
            "target", description="begin with the target's first layers, or with random weights"
        )

    def __init__(self, params: Params, target: Target, output: OutputRows, seed: int) -> None:
        super().__init__()
        self.params, self.output = params, output
        torch.manual_seed(seed)
        count = target.config.num_hidden_layers
        if params.layers > count:
            raise SpecdecError(
                f"drafter.layers: the target has {count} layers to read (found {params.layers})"
            )
        sizes = {"num_hidden_layers": params.layers, "block_size": params.block_size}
        if params.intermediate_size is not None:
            sizes["intermediate_size"] = params.intermediate_size
        # From the second layer on it shows in later tokens what a token of the text has read.
        causal = params.layers > 1
        config = GlideConfig.for_target(
            target.model, **sizes, large_layers=params.target_layers, causal_text=causal
        )
        check_fits(config, target.model, "drafter")
        embedding, layer = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        self.glide = GlideModel(config, target.model, embedding, layer)
        if params.start == "target":
            _start_from_target(self.glide, target)
        self.layers = tuple(self.glide.target_layers)
        self.dtype = target.dtype

    def forward(self, batch: Batch, seed: int | None) -> Outcome:
        count, length = batch.ids.shape
        device, size = batch.ids.device, self.params.block_size
        offset = 0 if seed is None else random.Random(seed).randrange(size)
        positions = torch.arange(length, device=device).expand(count, -1)
        hidden = self.glide(
            batch.ids,
            positions,
            [batch.layers[layer] for layer in self.layers],
            causal_mask(length, device),
            block_mask(length, size, device, offset),
        )
        done = distill(
            hidden[batch.trained][None], batch.features[batch.trained],
            batch.norm[batch.trained], batch.best[batch.trained], self.output, self.params.by,
        )  # fmt: skip
        return self._by_place(done, batch.trained, offset)

    def _by_place(self, done: Distilled, trained: torch.Tensor, offset: int) -> Outcome:
        """Sums for each place in a block, which is a step ahead."""
        size = self.params.block_size
        tokens = torch.arange(trained.shape[1], device=trained.device)
        place = ((tokens + offset) % size).expand_as(trained)
        at = torch.nn.functional.one_hot(place[trained], size).float()
        whole = torch.zeros(trained.shape, dtype=torch.bool, device=trained.device)
        whole[trained] = done.agreed[0]
        first = -offset % size
        blocks = max(0, trained.shape[1] - first) // size
        cut, blocked = (len(trained) * blocks, size), slice(first, first + blocks * size)
        chains = whole[:, blocked].reshape(cut)
        inside = trained[:, blocked].reshape(cut).all(1)
        return Outcome(
            loss=done.loss.sum(),
            positions=trained.sum(),
            count=at.sum(0),
            agreed=done.agreed[0].float() @ at,
            acceptance=done.acceptance[0] @ at,
            chains=chains[inside],
        )

    def save(self, folder: Path) -> None:
        copy.deepcopy(self.glide).to(self.dtype).save_pretrained(folder)

    def weights(self) -> dict[str, Tensor]:
        return self.glide.state_dict()

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self.glide.load_state_dict(weights)


@torch.no_grad()
def _start_from_target(glide: GlideModel, target: Target) -> None:
    """Take the target's first layers, which read embedded tokens as these do.

    The queries onto the target's last layers are those layers' own; what they find adds nothing at
    first. A target whose tensors have other names or shapes leaves the random weights.
    """
    layers, size = decoder_layers(target), glide.config.intermediate_size
    taken: dict[str, Tensor] = {}
    for index in range(len(glide.target_layers)):
        state = layers[index].state_dict()
        gate = state.get("mlp.gate_proj.weight")
        if gate is not None and size < len(gate):
            state = narrow(state, size)
        taken |= {f"model.layers.{index}.{name}": tensor for name, tensor in state.items()}
    for index, layer in enumerate(glide.target_layers):
        queries = layers[layer].state_dict().get("self_attn.q_proj.weight")
        if queries is not None:
            taken[f"model.layers.{index}.cross_attn.q_proj.weight"] = queries
    norm = getattr(target.model.base_model, "norm", None)
    if norm is not None:
        taken["model.norm.weight"] = norm.weight
    own = glide.state_dict()
    fitting = {
        name: tensor.to(own[name])
        for name, tensor in taken.items()
        if name in own and tensor.shape == own[name].shape
    }
    silent = {
        name: torch.zeros_like(tensor)
        for name, tensor in own.items()
        if name.endswith("cross_attn.o_proj.weight")
    }
    glide.load_state_dict(own | fitting | silent)
