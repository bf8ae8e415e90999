"""Training an EAGLE head: features and distributions, then reading its own features."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from specdec.drafters.eagle2 import EagleConfig, EagleHead
from specdec.params import Params as ParamsBase
from specdec.target import Target
from specdec.training.losses import Distance, OutputRows, distill, feature_loss
from specdec.training.recipe import Batch, Outcome, Recipe, chains_of


class Eagle2Recipe(Recipe):
    """Sources: the losses and the noise, EAGLE (arXiv 2401.15077); the steps in which the head reads
    its own features, HASS (arXiv 2408.15766) and EAGLE-3's training-time test (arXiv 2503.01840).

    Step 0 runs the head over the true features. In step s the pair at position i gets what step
    s - 1 predicted for its feature, and attends to what it would find when it drafts: true pairs up
    to i - s, then one pair of each step before it.
    """

    class Params(ParamsBase):
        name: Literal["eagle2"]
        layers: int = Field(1, ge=1, description="decoder layers of the head")
        steps: int = Field(3, ge=1, description="steps ahead that are trained")
        step_weight: float = Field(
            0.8, gt=0, le=1, description="weight of a step relative to the one before"
        )
        feature_weight: float = Field(0.1, ge=0, description="weight of the feature regression")
        noise: float = Field(
            0.1, ge=0, description="uniform noise on the true features, relative to their size"
        )
        by: Distance = Field("kl", description="distance of the distributions: kl or tv")
        depth: int = Field(5, ge=1, description="length of the drafts that τ is reported for")

    def __init__(self, params: Params, target: Target, output: OutputRows, seed: int) -> None:
        super().__init__()
        self.params, self.output = params, output
        torch.manual_seed(seed)
        self.head = EagleHead(_config(target, params.layers))
        self._embedding = (target.model.get_input_embeddings(),)
        self.dtype = target.dtype

    def forward(self, batch: Batch, seed: int | None) -> Outcome:
        embeds = self._embedding[0](batch.ids[:, 1:]).to(torch.float32)
        features = batch.features[:, :-1].to(torch.float32)
        if seed is not None and self.params.noise:
            features = features + self._noise(features, seed)
        trained = batch.trained[:, 1:]  # pair i predicts position i + 1
        evaluates = seed is None
        steps = max(self.params.steps, self.params.depth) if evaluates else self.params.steps
        outputs = self._unroll(embeds, features, steps)
        students = torch.stack([output[trained] for output in outputs])
        teacher = batch.features[:, 1:][trained]
        done = distill(
            students, teacher, batch.norm[:, 1:][trained], batch.best[:, 1:][trained],
            self.output, self.params.by,
        )  # fmt: skip
        losses = done.loss[: self.params.steps]
        if self.params.feature_weight:
            pairs = ((student, teacher) for student in students[: self.params.steps])
            regression = torch.stack([feature_loss(*pair) for pair in pairs])
            losses = losses + self.params.feature_weight * regression
        weights = self.params.step_weight ** torch.arange(len(losses), device=losses.device)
        chains = chains_of(done.agreed[: self.params.depth], trained)
        return Outcome.of((losses * weights).sum(), done, chains)

    def _unroll(self, embeds: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """What the head predicts at every pair, one to `steps` steps ahead: `[B, T, H]` each."""
        length = embeds.shape[1]
        positions = torch.arange(length, device=embeds.device)[None]
        cache = DynamicCache()
        outputs = [self.head(embeds, features, positions, cache=cache)]
        for step in range(1, steps):
            own = torch.cat([features[:, :1], outputs[-1][:, :-1].to(features.dtype)], dim=1)
            mask = unrolled_mask(length, step, outputs[0])
            outputs.append(self.head(embeds, own, positions, mask, cache))
        return outputs

    def _noise(self, features: Tensor, seed: int) -> Tensor:
        draw = torch.Generator(features.device).manual_seed(seed)
        uniform = torch.rand(features.shape, generator=draw, device=features.device) * 2 - 1
        size = features.square().mean(-1, keepdim=True).sqrt()
        return uniform * size * self.params.noise

    def save(self, folder: Path) -> None:
        copy.deepcopy(self.head).to(self.dtype).save_pretrained(folder)

    def weights(self) -> dict[str, Tensor]:
        return self.head.official_state_dict()

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        self.head.load_official_state_dict(weights)


def unrolled_mask(length: int, step: int, like: Tensor) -> Tensor:
    """`[1, 1, T, (step + 1) T]` for step `step`: 0 where pair i reads a key, lowest elsewhere.

    Keys of step 0 come first: read up to i - step. Of each later step j the key at i - step + j.
    """
    rows = torch.arange(length, device=like.device)
    back = rows[:, None] - rows
    parts = [back >= step] + [back == step - j for j in range(1, step + 1)]
    visible = torch.cat(parts, dim=1)
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~visible, torch.finfo(like.dtype).min)[None, None]


def _config(target: Target, layers: int) -> EagleConfig:
    config = target.config
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return EagleConfig(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None),
        num_hidden_layers=layers,
        vocab_size=config.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", 10_000.0),
        bias=True,
    )
