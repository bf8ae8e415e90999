"""The vocabulary a drafter covers, and how its logits meet the target's ids.

A drafter may know fewer tokens than the target (a reduced vocabulary, as in FR-Spec, arXiv
2502.14856: most of a small drafter's time goes to its output layer), or have rows of padding that
the target lacks. Tokens it does not cover are never drafted: `q` is 0 there, and decoding stays
lossless.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.drafters.checkpoint import find
from specdec.errors import SpecdecError
from specdec.state import GenerationState


class DraftVocabulary:
    """Maps draft logits `[..., Vd]` to the target's ids.

    Args:
        target_size: rows of the target's output layer.
        draft_size: rows of the drafter's own output layer.
        ids: `[Vd]` target ids whose logits the drafter computes; None for all that both have.

    Raises:
        SpecdecError: an id that the target or the drafter does not have, or one given twice.
    """

    def __init__(self, target_size: int, draft_size: int, ids: list[int] | None = None) -> None:
        self.target_size = target_size
        self.shared = min(target_size, draft_size)
        self.ids = None if ids is None else torch.tensor(_checked(ids, self.shared))

    def to(self, device: torch.device) -> DraftVocabulary:
        if self.ids is not None:
            self.ids = self.ids.to(device)
        return self

    @property
    def size(self) -> int:
        """Vd: number of tokens that can be drafted."""
        return self.shared if self.ids is None else len(self.ids)

    def output(self, layer: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """An output layer `[..., H]` -> `[..., V]`, cut to what is drafted: `[..., Vd]`.

        A reduced vocabulary gets a contiguous copy of its rows, made once.

        Args:
            dtype: of what goes into the layer.
        """
        if self.ids is None:
            size = self.shared
            return layer if size == self.target_size else lambda hidden: layer(hidden)[..., :size]
        weight, bias = _rows(layer, self.ids, dtype)
        return partial(functional.linear, weight=weight, bias=bias)

    def to_target(self, index: Tensor) -> Tensor:
        """Target ids for indices into `Vd`."""
        return index if self.ids is None else self.ids[index]

    def expand(self, logits: Tensor) -> Tensor:
        """`[..., V]` over the target's vocabulary, -inf for tokens that are not covered."""
        if self.ids is None and self.shared == self.target_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.target_size), -torch.inf)
        if self.ids is None:
            full[..., : self.shared] = logits
        else:
            full[..., self.ids] = logits
        return full

    def draw(
        self, logits: Tensor, state: GenerationState, path: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """One token for each row, by the sampler's rule for the node's own prefix.

        Args:
            logits: `[B, Vd]` raw.
            path: `[B, d]` drafted tokens before it.

        Returns:
            The tokens `[B]` (target ids); the distribution `[B, V]` they were drawn from, None for
            point masses (greedy); the raw logits `[B]` of the drawn tokens.
        """
        sampler = state.sampler
        if not sampler.do_sample and not sampler.processors and sampler.no_eos_before is None:
            best = logits.max(-1)
            return self.to_target(best.indices), None, best.values.float()
        full = self.expand(logits)
        tokens, probs = sampler.draw(sampler.scores(full, state, path))
        return tokens, probs, full.gather(1, tokens[:, None])[:, 0].float()


def _checked(ids: list[int], size: int) -> list[int]:
    outside = [token for token in ids if not 0 <= token < size]
    if outside or not ids:
        raise SpecdecError(
            f"draft_vocab: ids must lie in 0 to {size - 1}, the vocabulary that target and drafter "
            f"share; found {outside[:3] or 'none'}."
        )
    if len(set(ids)) != len(ids):
        raise SpecdecError("draft_vocab: an id is given twice.")
    return ids


def load_draft_vocab(
    source: list[int] | str | Literal[False] | None, checkpoint: str | Path | None = None
) -> list[int] | None:
    """The ids themselves, or those of a JSON file that holds a list of them.

    Args:
        source: ids, or a file; False for the whole vocabulary; None takes what `checkpoint` has.
        checkpoint: where `draft_vocab.json` may lie, a folder or a hub id.

    Raises:
        SpecdecError: no such file, or not a list of ids.
    """
    if isinstance(source, list):
        return source
    if source is None and checkpoint is not None:
        found = find(checkpoint, "draft_vocab.json")
        source = None if found is None else str(found)
    if not source:
        return None
    path = Path(source)
    if not path.is_file():
        raise SpecdecError(
            f"draft_vocab: there is no file '{source}'; give a JSON list of token ids."
        )
    try:
        ids = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise SpecdecError(f"draft_vocab: '{source}' is not JSON: {error}.") from error
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise SpecdecError(f"draft_vocab: '{source}' must hold a JSON list of token ids.")
    return ids


@torch.no_grad()
def _rows(layer: nn.Module, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Weight `[Vd, H]` and bias `[Vd]` of the rows `ids` of a linear layer."""
    if type(layer) is nn.Linear and layer.weight.is_floating_point():
        bias: Tensor | None = layer.bias
        return layer.weight[ids].detach(), None if bias is None else bias[ids].detach()
    # A quantised layer keeps its weight in a form of its own: ask for it column by column.
    unit = torch.eye(int(layer.in_features), dtype=dtype, device=ids.device)  # type: ignore[arg-type]
    offset = layer(torch.zeros_like(unit[:1]))[0, ids]
    columns = [layer(inputs)[:, ids] - offset for inputs in unit.split(256)]
    return torch.cat(columns).T.contiguous(), offset
