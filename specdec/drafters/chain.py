"""What all drafters of chains share: one distribution, one token a row, level by level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from specdec.draft import DraftStep, DraftTree
from specdec.drafters.base import Drafter
from specdec.host import send
from specdec.state import GenerationState
from specdec.target import pieces


class ChainDrafter(Drafter):
    """Drafts one token at a time.

    Subclasses give the logits: `first` for the token behind the root, `following` for each next one.
    They may cover a reduced vocabulary, which `vocabulary` maps to the target's ids.
    """

    last_step: DraftStep

    @property
    def proposes_chain(self) -> bool:
        return True

    def first(self, state: GenerationState) -> Tensor:
        """`[B, V]` raw logits behind the root, after catching up with what was committed.

        Rows with `state.limits` 0 do not draft; what is returned for them is ignored.
        """
        raise NotImplementedError

    def following(self, tokens: Tensor, depth: int) -> Tensor:
        """`[B, V]` raw logits behind `tokens [B]`, the drafted tokens number `depth` (from 1)."""
        raise NotImplementedError

    def catch_up(
        self,
        state: GenerationState,
        begun: list[int],
        device: torch.device,
        read: Callable[[Tensor, list[int], Tensor], Tensor],
    ) -> tuple[Tensor, list[int]]:
        """Read in pieces what was committed since, for `first`; rows that do not draft read nothing.

        Args:
            begun: how much of each row has been read.
            device: the drafter's.
            read: from tokens `[B, T]` that go to positions `starts[b]`, ... and the place `last [B]`
                of each row's last token among them, what is behind that token, `[B, ...]`.

        Returns:
            What `read` gave behind each row's root, and how much of each row has been read now.
        """
        ids = state.ids.to(device)
        ends = [
            length if limit > 0 else start
            for start, length, limit in zip(begun, state.lengths, state.limits, strict=True)
        ]
        behind_root: Tensor | None = None
        for starts, counts in pieces(begun, ends):
            index = send(starts, device)[:, None] + torch.arange(max(counts), device=device)
            count = send(counts, device)
            tokens = ids.gather(1, index.clamp_max(ids.shape[1] - 1))
            last = read(tokens, starts, count.clamp_min(1) - 1)
            if behind_root is not None:
                last = torch.where(count[:, None] > 0, last, behind_root)
            behind_root = last
        assert behind_root is not None, "a round has rows that draft"
        return behind_root, ends

    def begin(self, state: GenerationState) -> None:
        self.state = state
        self.tokens: list[Tensor] = []
        self.proposals: list[Tensor] = []
        self.alive = [limit > 0 for limit in state.limits]
        self.alive_at = [list(self.alive)]
        self._propose(self.first(state))

    def step(self) -> DraftStep:
        return self.last_step

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        if go_on is not True:
            self.alive = [alive and row[0] for alive, row in zip(self.alive, go_on, strict=True)]
        if not any(self.alive):
            return False
        self.alive_at.append(list(self.alive))
        self._propose(self.following(self.tokens[-1], len(self.tokens)))
        return True

    def finish(self) -> DraftTree:
        tokens = torch.stack(self.tokens, dim=1)
        valid = send(self.alive_at, tokens.device).T
        return DraftTree.chain(
            tokens, valid, torch.stack(self.proposals, dim=1) if self.proposals else None
        )

    def _propose(self, logits: Tensor) -> None:
        """Draw the next token of each row from `logits [B, V]`."""
        path = torch.stack(self.tokens, 1) if self.tokens else self._no_tokens(logits)
        tokens, proposal, picked = self.vocabulary.draw(logits, self.state, path)
        log_prob = picked - logits.float().logsumexp(-1)
        before = self.last_step.path_log_prob[:, 0] if self.tokens else 0.0
        self.tokens.append(tokens)
        if proposal is not None:
            self.proposals.append(proposal)
        self.last_step = DraftStep(
            depth=len(self.tokens),
            tokens=tokens[:, None],
            distributions=logits[:, None],
            path_log_prob=(before + log_prob)[:, None],
            rows=self.state.rows,
            active=send(self.alive, logits.device)[:, None],
        )

    @staticmethod
    def _no_tokens(like: Tensor) -> Tensor:
        return torch.zeros(len(like), 0, dtype=torch.long, device=like.device)
