"""Every drafter and every policy that the tests of the core run over. Add a new one to the lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.base import Drafter
from specdec.drafters.cape import CapeDrafter
from specdec.drafters.eagle2 import Eagle2Drafter, EagleConfig, EagleHead
from specdec.drafters.glide import GlideConfig, GlideDrafter, GlideModel
from specdec.drafters.ngram import NgramDrafter
from specdec.policies import (
    ConfidencePolicy,
    FixedPolicy,
    HeuristicPolicy,
    LengthPolicy,
    SVIPPolicy,
)
from tests.tiny import llama, noisy


def autoregressive(target: PreTrainedModel, eps: float = 0.05, **parameters: Any) -> Drafter:
    """A drafter that is right most of the time; `eps=0` always is."""
    return AutoregressiveDrafter(model=noisy(target, eps), **parameters)


def eagle2(target: PreTrainedModel, **parameters: Any) -> Drafter:
    """A random head: a wide tree, so that something of it is accepted."""
    torch.manual_seed(3)
    sizes = target.config
    config = EagleConfig(
        hidden_size=sizes.hidden_size, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=sizes.vocab_size, bias=False,
    )  # fmt: skip
    head = EagleHead(config).eval()
    return Eagle2Drafter(checkpoint=head, **({"top_k": 12, "total_tokens": 40} | parameters))


def glide(target: PreTrainedModel, **parameters: Any) -> Drafter:
    """A random decoder that reads the target's cache."""
    torch.manual_seed(4)
    model = GlideModel(
        GlideConfig.for_target(target, intermediate_size=48),
        target,
        embedding=target.get_input_embeddings(),
        output=target.get_output_embeddings(),
    )
    return GlideDrafter(checkpoint=model.eval(), **parameters)


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "twin": lambda target: autoregressive(target, eps=0),
    "autoregressive": autoregressive,
    "stranger": lambda target: AutoregressiveDrafter(model=llama(seed=9)),
    "ngram": lambda target: NgramDrafter(num_tokens=8),
    "eagle2": eagle2,
    "eagle2_chain": lambda target: eagle2(target, chain=True),
    "glide": glide,
    "cape": lambda target: CapeDrafter(base=autoregressive(target)),
    "cape_glide": lambda target: CapeDrafter(base=glide(target)),
}
"""Name: a drafter for a target with 64 tokens. `twin` and `stranger` are the two ends of acceptance."""

POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: FixedPolicy(length=8),
    "heuristic": lambda: HeuristicPolicy(initial=3),
    "svip": lambda: SVIPPolicy(threshold=0.3),
    "confidence": lambda: ConfidencePolicy(threshold=0.4),
}
