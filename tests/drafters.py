"""Every drafter and every policy that the tests of the core run over. Add a new one to the lists."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.draft import ROOT, DraftStep, DraftTree
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.base import Drafter
from specdec.drafters.cape import CapeDrafter
from specdec.drafters.eagle2 import Eagle2Drafter, EagleConfig, EagleHead
from specdec.drafters.glide import GlideConfig, GlideDrafter, GlideModel
from specdec.drafters.lookup import LookupDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.params import Params as ParamsBase
from specdec.policies import (
    ConfidencePolicy,
    FixedPolicy,
    HeuristicPolicy,
    LengthPolicy,
    SVIPPolicy,
)
from specdec.state import GenerationState
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
    return Eagle2Drafter(checkpoint=head, **({"top_k": 24, "total_tokens": 80} | parameters))


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
    "cape_glide": lambda target: CapeDrafter(base=glide(target), candidates=[24, 16, 16, 16]),
    "lookup": lambda target: LookupDrafter(base=eagle2(target)),
}
"""Name: a drafter for a target with 64 tokens. `twin` and `stranger` are the two ends of acceptance."""

POLICIES: dict[str, Callable[[], LengthPolicy]] = {
    "fixed": lambda: FixedPolicy(length=8),
    "heuristic": lambda: HeuristicPolicy(initial=3),
    "svip": lambda: SVIPPolicy(threshold=0.3),
    "confidence": lambda: ConfidencePolicy(threshold=0.4),
}


class Scripted(Drafter):
    """Drafts what a function says, a whole round at once.

    `draft(row, text, limit)` gives the tokens and the parents of one row's tree; no path may be
    longer than `limit`.
    """

    class Params(ParamsBase):
        draft: Any

    def begin(self, state: GenerationState) -> None:
        self.state = state
        trees = [
            self.params.draft(row, state.ids[place, :length].tolist(), limit) if limit else ([], [])
            for place, (row, length, limit) in enumerate(
                zip(state.rows, state.lengths, state.limits, strict=True)
            )
        ]
        size = max(len(tokens) for tokens, _ in trees)
        self.size = size
        self.valid = torch.tensor([[i < len(tokens) for i in range(size)] for tokens, _ in trees])
        self.tokens = torch.tensor([tokens + [0] * (size - len(tokens)) for tokens, _ in trees])
        self.parents = torch.tensor([up + [ROOT] * (size - len(up)) for _, up in trees])

    def step(self) -> DraftStep | None:
        if not self.size:
            return None
        tokens = self.tokens[:, :1]
        nothing = torch.zeros(tokens.shape)
        return DraftStep(1, tokens, None, nothing, self.state.rows, self.valid[:, :1])

    def extend(self, go_on: Any) -> bool:
        return False

    def finish(self) -> DraftTree:
        depth = torch.zeros_like(self.parents)
        for node in range(self.size):
            up = self.parents[:, node]
            above = depth.gather(1, up.clamp_min(0)[:, None])[:, 0]
            depth[:, node] = torch.where(up == ROOT, 0, above) + 1
        return DraftTree(self.tokens, self.parents, self.valid, depth=int(depth.max()))


def random_trees(texts: list[list[int]], seed: int = 0, vocab_size: int = 64) -> Scripted:
    """Trees of random shape in which the right tokens hide at random places.

    Args:
        texts: what each row will be in the end, prompt included.
    """
    draw = random.Random(seed)

    def draft(row: int, text: list[int], limit: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        frontier = [(ROOT, True)]
        for depth in range(min(limit, draw.randint(1, 4))):
            grown = []
            for parent, is_right in frontier:
                children = draw.sample(range(vocab_size), draw.randint(0, 3))
                position = len(text) + depth
                right = texts[row][position] if is_right and position < len(texts[row]) else None
                if right is not None and right not in children and draw.random() < 0.7:
                    children.insert(draw.randint(0, len(children)), right)
                for child in children:
                    tokens.append(child)
                    parents.append(parent)
                    grown.append((len(tokens) - 1, child == right))
            frontier = grown
        return tokens, parents

    return Scripted(draft=draft)
