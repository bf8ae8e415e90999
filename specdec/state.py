"""The state of one generation: what has been committed, and what each part needs to know of it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.cache import SlotCache
from specdec.host import send
from specdec.sampling import Sampler


class GenerationState:
    """The rows of one generation.

    Attributes:
        ids: `[B, capacity]` on the target's device; row b's committed tokens are
            `ids[b, :lengths[b]]`. The last of them is the root: its keys and values are not in the
            target's cache yet.
        lengths: committed tokens of each row, prompt and root included. On the host.
        rows: for each row, its index in the batch that the generation started with.
        limits: for each row, the longest path worth drafting in this round: the token budget and
            the context leave no room for more. 0 means that the row does not draft.
        cache: the target's keys and values; row b holds `lengths[b] - 1` positions between rounds.
        sampler: turns logits into distributions, for the target and the drafter alike.
        eos: `[E]` ids that end a text, on the target's device (possibly none).
    """

    def __init__(
        self, prompts: list[list[int]], cache: SlotCache, sampler: Sampler, eos: list[int],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.lengths = [len(prompt) for prompt in prompts]
        self.rows = list(range(len(prompts)))
        self.limits = [0] * len(prompts)
        self.cache = cache
        self.sampler = sampler
        self.eos = torch.tensor(eos, dtype=torch.long, device=device)
        self.ids = torch.zeros(len(prompts), 2 * max(self.lengths), dtype=torch.long, device=device)
        width = max(self.lengths)
        padded = [prompt + [0] * (width - len(prompt)) for prompt in prompts]
        self.ids[:, :width] = torch.tensor(padded, dtype=torch.long)

    @property
    def batch_size(self) -> int:
        """Rows that are still being written."""
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def roots(self) -> Tensor:
        """`[B]` the last committed token of each row."""
        return self.ids.gather(1, self.last_positions[:, None])[:, 0]

    @property
    def last_positions(self) -> Tensor:
        """`[B]` position of the root of each row."""
        return send(self.lengths, self.device) - 1

    def append(self, tokens: list[list[int]]) -> None:
        """Commit tokens to each row (host lists of any length)."""
        longest = max(self.lengths) + max(map(len, tokens))
        if longest > self.ids.shape[1]:
            grown = self.ids.new_zeros(self.ids.shape[0], 2 * longest)
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown
        width = max(map(len, tokens))
        padded = [new + [0] * (width - len(new)) for new in tokens]
        places = self.last_positions[:, None] + torch.arange(1, width + 1, device=self.device)
        # Rows with fewer tokens get zeros behind their end, which the next tokens overwrite.
        self.ids.scatter_(1, places, send(padded, self.device).long())
        self.lengths = [length + len(new) for length, new in zip(self.lengths, tokens, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        """Only these rows stay; the others have finished."""
        self.ids = self.ids[send(rows, self.device)]
        self.lengths = [self.lengths[row] for row in rows]
        self.limits = [self.limits[row] for row in rows]
        self.rows = [self.rows[row] for row in rows]
        self.cache.keep_rows(rows)
