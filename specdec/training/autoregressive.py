"""Training a small language model as drafter, made of layers of the target."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import SpecdecError
from specdec.params import Params as ParamsBase
from specdec.target import Target
from specdec.training.layers import decoder_layers, decoder_layers_of, narrow
from specdec.training.losses import Distance, OutputRows, distill
from specdec.training.recipe import Batch, Outcome, Recipe, chains_of


class AutoregressiveRecipe(Recipe):
    """Some of the target's layers between its own embedding and output layer, distilled.

    Sources: layers of a larger model as a beginning, DistilBERT (arXiv 1910.01108); distilling a
    drafter on the target's distributions, DistillSpec (arXiv 2310.08461).
    """

    class Params(ParamsBase):
        name: Literal["autoregressive"]
        layers: list[int] = Field(
            min_length=1, description="which of the target's layers, in order"
        )
        intermediate_size: int | None = Field(
            None, ge=1, description="keep only this many neurons of each MLP, the strongest ones"
        )
        by: Distance = Field("kl", description="distance of the distributions: kl or tv")
        depth: int = Field(5, ge=1, description="length of the drafts that τ is reported for")

    def __init__(self, params: Params, target: Target, output: OutputRows, seed: int) -> None:
        super().__init__()
        self.params, self.output = params, output
        torch.manual_seed(seed)
        self.tokenizer, self.dtype = target.tokenizer, target.dtype
        model = make_smaller(target, params.layers, params.intermediate_size)
        nn.Module.to(model, target.device)
        # Held in tuples: they are no parameters of this module, so they are not trained.
        self._model, self._embedding = (model,), (model.get_input_embeddings(),)
        names = set(model.state_dict())
        model.set_input_embeddings(nn.Identity())
        self.body = model.base_model
        self.of_target = frozenset(names - self.weights().keys())

    def forward(self, batch: Batch, seed: int | None) -> Outcome:
        embeds = self._embedding[0](batch.ids)
        hidden = self.body(inputs_embeds=embeds, use_cache=False)[0]
        done = distill(
            hidden[batch.trained][None], batch.features[batch.trained],
            batch.norm[batch.trained], batch.best[batch.trained], self.output, self.params.by,
        )  # fmt: skip
        chains = chains_of(done.agreed.expand(self.params.depth, -1), batch.trained)
        return Outcome.of(done.loss.sum(), done, chains)

    def save(self, folder: Path) -> None:
        model = copy.deepcopy(self._model[0])
        model.set_input_embeddings(copy.deepcopy(self._embedding[0]))
        model.tie_weights()
        nn.Module.to(model, self.dtype)
        model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def weights(self) -> dict[str, Tensor]:
        prefix = self._model[0].base_model_prefix
        return {f"{prefix}.{name}": tensor for name, tensor in self.body.state_dict().items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        prefix = f"{self._model[0].base_model_prefix}."
        self.body.load_state_dict({n.removeprefix(prefix): w for n, w in weights.items()})


@torch.no_grad()
def make_smaller(
    target: Target, layers: list[int], intermediate_size: int | None
) -> PreTrainedModel:
    """A model of the target's kind, in float32, with some of its layers and narrower MLPs.

    Raises:
        SpecdecError: the target has no such layer, or its MLPs cannot be made narrower this way.
    """
    sources = decoder_layers(target)
    outside = [index for index in layers if not 0 <= index < len(sources)]
    if outside:
        raise SpecdecError(
            f"drafter.layers: the target has layers 0 to {len(sources) - 1} (found {outside[0]})"
        )
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = [text.layer_types[index] for index in layers]
    if intermediate_size is not None:
        text.intermediate_size = intermediate_size
    model = type(target.model)(config).float().eval()
    _copy_rest(model, target.model)
    for layer, index in zip(decoder_layers_of(model), layers, strict=True):
        state = {name: tensor.float() for name, tensor in sources[index].state_dict().items()}
        if intermediate_size is not None:
            state = narrow(state, intermediate_size)
        layer.load_state_dict(state)
    return model


def _copy_rest(model: PreTrainedModel, source: PreTrainedModel) -> None:
    """Everything but the layers: embeddings, final norm."""
    inside = {id(tensor) for layer in decoder_layers_of(model) for tensor in layer.parameters()}
    found = dict(source.named_parameters())
    for name, tensor in model.named_parameters():
        if id(tensor) not in inside:
            tensor.copy_(found[name])
