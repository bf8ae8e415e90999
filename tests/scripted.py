"""A drafter whose trees a test prescribes: any number of sampled and fixed children at every node."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from specdec import Drafter
from specdec.draft import ROOT, DraftStep, DraftTree
from specdec.params import Params as ParamsBase
from specdec.state import GenerationState


class ScriptedDrafter(Drafter):
    """Every node gets `sampled` children drawn without replacement, then `fixed` ones.

    The distribution behind a token is `table[token]`, so nothing has to be computed for a draft.
    Fixed children are the best tokens of the table; every third one repeats the best once more.
    """

    class Params(ParamsBase):
        table: Any = Field(description="`[V, V]` logits behind each token")
        sampled: int = 0
        fixed: int = 0
        depth: int = 3

    def begin(self, state: GenerationState) -> None:
        self.state = state
        self.tokens: list[Tensor] = []
        self.parents: list[Tensor] = []
        self.valid: list[Tensor] = []
        self.proposals: list[Tensor] = []
        self.size = self.distributions = 0
        batch = state.batch_size
        self._grow(
            state.roots[:, None],
            torch.full((batch, 1), ROOT),
            torch.tensor(state.limits)[:, None] > 0,
            torch.zeros(batch, 1, 0, dtype=torch.long),
        )

    def step(self) -> DraftStep:
        return self.last_step

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        alive = self.alive if go_on is True else self.alive & torch.tensor(go_on)
        if len(self.tokens) == self.params.depth or not alive.any():
            return False
        self._grow(self.tokens[-1], self.nodes, alive, self.path)
        return True

    def finish(self) -> DraftTree:
        per_parent = self.params.sampled + self.params.fixed
        tokens = torch.cat(self.tokens, dim=1)
        place = torch.arange(tokens.shape[1])
        sampled = (place % per_parent < self.params.sampled).expand(tokens.shape)
        drawn = self.params.sampled > 0
        return DraftTree(
            tokens,
            torch.cat(self.parents, dim=1),
            torch.cat(self.valid, dim=1),
            depth=len(self.tokens),
            sampled=sampled if drawn else None,
            proposals=torch.cat(self.proposals, dim=1) if drawn else None,
            proposal=(place // per_parent).expand(tokens.shape) if drawn else None,
            max_sampled=self.params.sampled,
        )

    def _grow(self, tokens: Tensor, nodes: Tensor, alive: Tensor, path: Tensor) -> None:
        """One level: the children of `tokens [B, P]`, which are the nodes `nodes` of the tree."""
        batch, width = tokens.shape
        logits = self.params.table[tokens]
        children = torch.cat([self._drawn(logits, path), self._best(logits)], dim=-1)
        source = torch.arange(width).repeat_interleave(children.shape[-1]).expand(batch, -1)
        self.tokens.append(children.flatten(1))
        self.parents.append(nodes.gather(1, source))
        self.alive = alive.gather(1, source)
        self.valid.append(self.alive)
        self.nodes = (self.size + torch.arange(source.shape[1])).expand(batch, -1)
        self.size += source.shape[1]
        above = path.gather(1, source[..., None].expand(-1, -1, path.shape[-1]))
        self.path = torch.cat([above, self.tokens[-1][..., None]], dim=-1)
        self.last_step = DraftStep(
            depth=len(self.tokens),
            tokens=self.tokens[-1],
            distributions=logits,
            path_log_prob=torch.zeros(source.shape),
            rows=self.state.rows,
            active=self.alive,
            source=source,
        )

    def _drawn(self, logits: Tensor, path: Tensor) -> Tensor:
        batch, width = logits.shape[:2]
        rows = torch.arange(batch).repeat_interleave(width)
        sampler = self.state.sampler
        scores = sampler.scores(logits.flatten(0, 1), self.state, path.flatten(0, 1), rows)
        probs = torch.softmax(scores, dim=-1).unflatten(0, (batch, width))
        self.proposals.append(probs)
        return sampler.without_replacement(probs, self.params.sampled)

    def _best(self, logits: Tensor) -> Tensor:
        best = logits.topk(self.params.fixed, dim=-1).indices
        best[..., 2::3] = best[..., :1]
        return best
