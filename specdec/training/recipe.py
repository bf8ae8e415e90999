"""What a way of training looks like to the trainer: a module from a batch to sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from specdec.drafters.checkpoint import differing_tensors, read_weights
from specdec.errors import SpecdecError
from specdec.params import Params
from specdec.plugins import resolve_model
from specdec.training.features import KeysValues, States
from specdec.training.losses import Distilled, OutputRows
from specdec.training.sequences import Text


@dataclass
class Batch:
    """Texts of a batch, padded on the right to T tokens.

    Attributes:
        ids: `[B, T]`.
        features: `[B, T, H]` of the target.
        norm, best: `[B, T]` as in `States`.
        trained: `[B, T]` True at positions whose distribution is learnt.
        layers: keys and values `[B, heads, T, D]` of the target's layers.
    """

    ids: Tensor
    features: Tensor
    norm: Tensor
    best: Tensor
    trained: Tensor
    layers: dict[int, KeysValues]

    @classmethod
    def of(cls, texts: Sequence[Text], states: Sequence[States]) -> Batch:
        length = max(len(text.ids) for text in texts)
        trained = torch.zeros(len(texts), length, dtype=torch.bool)
        for row, text in enumerate(texts):
            trained[row, text.trained] = True
        layers = {
            layer: (
                _pad([state.layers[layer][0].transpose(0, 1) for state in states], length),
                _pad([state.layers[layer][1].transpose(0, 1) for state in states], length),
            )
            for layer in states[0].layers
        }
        return cls(
            ids=_pad([torch.tensor(text.ids) for text in texts], length),
            features=_pad([state.features for state in states], length),
            norm=_pad([state.norm for state in states], length),
            best=_pad([state.best for state in states], length),
            trained=trained,
            layers={
                layer: (keys.transpose(1, 2), values.transpose(1, 2))
                for layer, (keys, values) in layers.items()
            },
        )

    def to(self, device: torch.device) -> Batch:
        moved = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if field.name != "layers"
        }
        layers = {
            layer: (keys.to(device), values.to(device))
            for layer, (keys, values) in self.layers.items()
        }
        return Batch(**moved, layers=layers)


@dataclass
class Outcome:
    """Sums over the trained positions of a batch, for S steps ahead.

    Attributes:
        loss: scalar, differentiable.
        positions: how many positions `loss` sums over.
        count: `[S]` positions that were summed over for each step.
        agreed, acceptance: `[S]` as in `Distilled`.
        chains: `[C, S]` for a draft from each of C roots, whether its first, second, ... token is
            the target's choice. Only used where the text is the target's greedy choice.
    """

    loss: Tensor
    positions: Tensor
    count: Tensor
    agreed: Tensor
    acceptance: Tensor
    chains: Tensor

    @classmethod
    def of(cls, loss: Tensor, done: Distilled, chains: Tensor) -> Outcome:
        steps, positions = done.agreed.shape
        count = torch.full((steps,), positions, device=loss.device)
        return cls(loss, count[0], count, done.agreed.sum(1), done.acceptance.sum(1), chains)


class Recipe(nn.Module):
    """One kind of drafter in training. Its parameters are the drafter's own, nothing of the target's.

    `forward(batch, seed)` gives an `Outcome`. `seed` decides what is drawn (noise); None, in
    evaluation, draws nothing.
    """

    Params: ClassVar[type[Params]] = Params
    layers: tuple[int, ...] = ()
    """Layers of the target whose keys and values the batches must hold."""
    of_target: frozenset[str] = frozenset()
    """Names in a saved drafter that are the target's."""
    output: OutputRows

    def forward(self, batch: Batch, seed: int | None) -> Outcome:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write the drafter as `specdec` loads it."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """The drafter's own weights under the names that `save` writes."""
        raise NotImplementedError

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over weights under those names."""
        raise NotImplementedError

    def begin_with(self, checkpoint: str) -> None:
        """Take over the weights of a drafter that is there already.

        Args:
            checkpoint: a folder, a hub id or a name that a plugin registered.

        Raises:
            SpecdecError: it cannot be read, or is a drafter of another kind or size.
        """
        found, own = read_weights(resolve_model(checkpoint, "init_from")), self.weights()
        found = {name: tensor for name, tensor in found.items() if name not in self.of_target}
        missing, unexpected, reshaped = differing_tensors(found, own)
        faults = [f"it has no {name}" for name in missing]
        faults += [
            f"{name} is {list(found[name].shape)} there, {list(own[name].shape)} here"
            for name in reshaped
        ]
        faults += [f"it has {name}" for name in unexpected]
        if faults:
            raise SpecdecError(
                f"init_from: {checkpoint} is not a drafter like the one to be trained: "
                f"{'; '.join(sorted(faults)[:3])}{'; ...' if len(faults) > 3 else ''}"
            )
        self.set_weights({name: found[name].to(tensor) for name, tensor in own.items()})


def chains_of(agreed: Tensor, trained: Tensor) -> Tensor:
    """`[C, S]` from single predictions to drafts, one for each root that has room for S tokens.

    A draft from root r predicts position r one step ahead, r + 1 two steps ahead, and so on.

    Args:
        agreed: `[S, N]` for the N trained positions, in order; S is the depth of the draft.
        trained: `[B, T]`.
    """
    steps = len(agreed)
    whole = torch.zeros(steps, *trained.shape, dtype=torch.bool, device=trained.device)
    whole[:, trained] = agreed
    room = trained.shape[1] - steps + 1
    if room <= 0:
        return agreed.new_zeros(0, steps)
    shifted = torch.stack([whole[step, :, step : step + room] for step in range(steps)], dim=-1)
    inside = torch.stack([trained[:, step : step + room] for step in range(steps)]).all(0)
    return shifted[inside]


def block_efficiency(chains: Tensor) -> float:
    """τ of greedy decoding: one round after the other over `chains [C, S]`, bonus tokens included.

    Neighbouring roots stand in neighbouring rows; the next round begins behind what was accepted.
    """
    accepted = chains.int().cumprod(1).sum(1).tolist()
    root = rounds = 0
    while root < len(accepted):
        root += accepted[root] + 1
        rounds += 1
    return len(accepted) / rounds if rounds else 0.0


def _pad(rows: Sequence[Tensor], length: int) -> Tensor:
    padded = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
