"""The data that flows between drafters, policies and the target.

`DraftStep` is one level of drafting, as a length policy sees it. `DraftTree` is all that was
drafted in a round, as the target sees it. `RoundOutcome` is what became of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

ROOT = -1
"""The parent index of the nodes that hang from the root."""


@dataclass
class DraftStep:
    """One level of drafting: the frontier's tokens and the distributions they came from.

    Tokens that share a parent share a distribution, so the distributions are kept once
    (`distributions [B, P, V]`) and `source [B, W]` says which one each token came from.

    Attributes:
        depth: number of drafted tokens on each path so far, this level included (1 is the first).
        tokens: `[B, W]` token ids of the frontier.
        distributions: `[B, P, V]` raw draft logits, before temperature and any processor; None when
            the drafter proposes without a distribution (n-gram matches are point masses). With a
            reduced draft vocabulary `V` counts that vocabulary only.
        source: `[B, W]` index into `P`; None means that token w came from distribution w.
        path_log_prob: `[B, W]` log-probability of each path under the drafter.
        rows: for each row of this step, its index in the batch the generation started with.
            A policy that keeps something per row indexes it with this: finished rows leave.
        active: `[B, W]` False where there is nothing to decide (a row that has stopped drafting,
            a branch that ended); what a policy answers there is ignored.
    """

    depth: int
    tokens: Tensor
    distributions: Tensor | None
    path_log_prob: Tensor
    rows: list[int]
    active: Tensor
    source: Tensor | None = None

    @property
    def logits(self) -> Tensor | None:
        """`[B, W, V]` raw logits of the distribution that each token came from."""
        if self.distributions is None or self.source is None:
            return self.distributions
        index = self.source[..., None].expand(-1, -1, self.distributions.shape[-1])
        return self.distributions.gather(1, index)

    @cached_property
    def log_probs(self) -> Tensor | None:
        """`[B, P, V]` log-softmax of `distributions`, float32."""
        if self.distributions is None:
            return None
        return torch.log_softmax(self.distributions.float(), dim=-1)

    @property
    def probs(self) -> Tensor | None:
        """`[B, W, V]` untempered draft probabilities; None for point masses."""
        logits = self.logits
        return None if logits is None else torch.softmax(logits.float(), dim=-1)

    @cached_property
    def entropy(self) -> Tensor:
        """`[B, W]` entropy in nats of each token's untempered distribution; 0 for point masses."""
        if self.log_probs is None:
            return torch.zeros_like(self.path_log_prob)
        # exp(-inf) * -inf is NaN: a token that cannot be drawn adds nothing to the entropy.
        finite = self.log_probs.clamp_min(torch.finfo(torch.float32).min)
        return self._per_token(-(finite.exp() * finite).sum(-1))

    @cached_property
    def top_prob(self) -> Tensor:
        """`[B, W]` largest probability of each token's untempered distribution; 1 for point masses."""
        if self.distributions is None:
            return torch.ones_like(self.path_log_prob)
        # max - logsumexp needs no probabilities over the whole vocabulary.
        logits = self.distributions.float()
        return self._per_token((logits.amax(-1) - logits.logsumexp(-1)).exp())

    def _per_token(self, per_distribution: Tensor) -> Tensor:
        return per_distribution if self.source is None else per_distribution.gather(1, self.source)


@dataclass
class DraftTree:
    """All nodes drafted in one round, in topological order (a parent before its children).

    Siblings are tried in their order. Among siblings the sampled ones come before the fixed ones,
    and sampled siblings were drawn without replacement from their parent's distribution (those behind
    the last token with any probability are passed over).

    Attributes:
        tokens: `[B, N]` token ids.
        parents: `[B, N]` index of the parent node, `ROOT` (-1) for children of the root.
        valid: `[B, N]` False for padding, in rows that drafted less than others.
        depth: the largest number of nodes on a path, over all rows.
        is_chain: node i's parent is node i - 1, in every row.
        sampled: `[B, N]` True where the token was drawn from a distribution, False where the node is
            a point mass (top-k children, n-gram matches); None when all are fixed.
        proposals: `[B, M, V]` the *processed* distributions (temperature, top-p, penalties) that
            sampled nodes were drawn from, over the target's vocabulary.
        proposal: `[B, N]` index into `M` for sampled nodes.
        max_sampled: the largest number of sampled siblings anywhere.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    depth: int
    is_chain: bool = False
    sampled: Tensor | None = None
    proposals: Tensor | None = None
    proposal: Tensor | None = None
    max_sampled: int = 0

    @classmethod
    def empty(cls, batch_size: int, device: torch.device) -> DraftTree:
        """A round without a draft: plain decoding."""
        none = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        return cls(none, none, none.bool(), depth=0, is_chain=True)

    @classmethod
    def chain(cls, tokens: Tensor, valid: Tensor, proposals: Tensor | None = None) -> DraftTree:
        """A tree of one branch.

        Args:
            tokens: `[B, N]`.
            valid: `[B, N]`.
            proposals: `[B, N, V]` the distribution that each token was sampled from; None when the
                tokens are fixed (greedy drafts, n-gram matches).
        """
        batch, length = tokens.shape
        index = torch.arange(length, device=tokens.device).expand(batch, length)
        return cls(
            tokens,
            index - 1,
            valid,
            depth=length,
            is_chain=True,
            sampled=None if proposals is None else torch.ones_like(valid),
            proposals=proposals,
            proposal=None if proposals is None else index,
            max_sampled=0 if proposals is None else 1,
        )

    def with_fixed(self, tokens: Tensor, parents: Tensor, valid: Tensor, depth: int) -> DraftTree:
        """The same tree with fixed nodes `[B, M]` behind its own, which keep their numbers.

        Args:
            depth: of the whole tree.
        """
        if not tokens.shape[1]:
            return self
        sampled, proposal = self.sampled, self.proposal
        return DraftTree(
            torch.cat([self.tokens, tokens], dim=1),
            torch.cat([self.parents, parents], dim=1),
            torch.cat([self.valid, valid], dim=1),
            depth=depth,
            sampled=None
            if sampled is None
            else torch.cat([sampled, torch.zeros_like(valid)], dim=1),
            proposals=self.proposals,
            proposal=None
            if proposal is None
            else torch.cat([proposal, torch.zeros_like(tokens)], dim=1),
            max_sampled=self.max_sampled,
        )

    def to(self, device: torch.device) -> DraftTree:
        """The same tree on the target's device (a drafter may live on another)."""
        if self.tokens.device == device:
            return self
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in parts.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @property
    def size(self) -> int:
        """N: drafted nodes of the widest row."""
        return self.tokens.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """`[B, N + 1, N + 1]` True where row node sees column node: itself and its ancestors.

        Node 0 is the root, node i + 1 is `tokens[:, i]`.
        """
        batch, size = self.tokens.shape
        eye = torch.eye(size + 1, dtype=torch.bool, device=self.tokens.device)
        if self.is_chain:
            return eye.new_ones(size + 1, size + 1).tril().expand(batch, -1, -1)
        sees = eye.repeat(batch, 1, 1)
        up = torch.cat([self.parents.new_zeros(batch, 1), self.parents + 1], dim=1)
        pointer = up
        for _ in range(self.depth):
            sees |= eye[pointer]
            pointer = up.gather(1, pointer)
        return sees

    @cached_property
    def depths(self) -> Tensor:
        """`[B, N + 1]` number of drafted tokens from the root to each node (0 for the root)."""
        if self.is_chain:
            index = torch.arange(self.size + 1, device=self.tokens.device)
            return index.expand(self.tokens.shape[0], -1)
        return self.ancestors.sum(-1) - 1


@dataclass
class RoundOutcome:
    """What one round committed.

    Attributes:
        rows: for each row, its index in the batch the generation started with.
        tokens: the committed token ids of each row: accepted drafts, then the bonus token (which is
            missing only where the text ended inside the draft).
        accepted: number of accepted draft tokens of each row.
        drafted: number of draft tokens that were verified, of each row (all nodes of a tree).
        draft_length: length of the longest drafted path of each row.
        cut: True where drafting ended because the text had to end (token budget, context length,
            a drafted end of text), not because the policy or the drafter wanted to stop.
        path: `[B, D + 1]` on the target's device: the root (0) and the accepted nodes (i + 1 for
            node i of the tree); entries past `accepted[b]` have no meaning.
        path_nodes: the same on the host, cut to the accepted nodes.
        draft_seconds, verify_seconds: time of this round's drafting and of its target pass.
    """

    rows: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    draft_length: list[int]
    cut: list[bool]
    path: Tensor
    path_nodes: list[list[int]]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    finish_reasons: list[str | None] = field(default_factory=list)
