"""What the target computes over the training texts, once for all epochs and drafters.

A drafter is trained on the target's features (the input of its output layer), on its distributions
(which the output layer makes of them) and, for GliDe, on the keys and values of its last layers.
Running the target costs far more than a pass of a drafter, so it runs once; what it gave is kept in
memory, or in a folder in which every file is named after what it was made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from specdec.cache import SlotCache
from specdec.errors import SpecdecError
from specdec.target import Target
from specdec.training.files import write_atomically
from specdec.training.sequences import Text

TEXTS_IN_CHUNK = 128
LOGITS_AT_A_TIME = 512
LEAST_AGREEMENT = 0.5
"""Greedy text is the target's own argmax but for rounding; anything lower is another model's text."""

KeysValues = tuple[Tensor, Tensor]


@dataclass
class States:
    """What the target computed over one text of T tokens.

    Attributes:
        features: `[T, H]`.
        norm: `[T]` logsumexp of the logits over the whole vocabulary, at trained positions.
        best: `[T]` the most probable next token, at trained positions.
        layers: for each layer asked for, keys (rotated) and values `[heads, T, D]`.
    """

    features: Tensor
    norm: Tensor
    best: Tensor
    layers: dict[int, KeysValues]


class FeatureStore:
    """The target's states of `texts`: `store[i]` are those of text i.

    Args:
        target: runs over what is not there yet.
        layers: layers whose keys and values are wanted.
        folder: where they are kept; None keeps them in memory.
        share: (rank, world size): which chunks this process computes when they are kept in a
            folder; the caller waits for the others before it reads.
        report: called with (chunks done, chunks).

    Raises:
        SpecdecError: the texts are not the target's, or the folder cannot be written to.
    """

    def __init__(
        self,
        target: Target,
        texts: Sequence[Text],
        layers: Sequence[int] = (),
        folder: Path | None = None,
        batch_tokens: int = 4096,
        share: tuple[int, int] = (0, 1),
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        self.texts, self.layers, self.folder = texts, tuple(layers), folder
        self._target, self._batch_tokens = target, batch_tokens
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._files: dict[str, Any] = {}
        chunks = [
            texts[start : start + TEXTS_IN_CHUNK] for start in range(0, len(texts), TEXTS_IN_CHUNK)
        ]
        mark = _fingerprint(target)
        self._names = [_chunk_name(mark, chunk) for chunk in chunks]
        self._starts = [start for chunk in chunks for start in _starts(chunk)]
        rank, world = share if folder is not None else (0, 1)
        for number, (name, chunk) in enumerate(zip(self._names, chunks, strict=True)):
            if number % world == rank:
                self._make(name, chunk)
            if report is not None:
                report(number + 1, len(chunks))

    def __getitem__(self, index: int) -> States:
        chunk = self._names[index // TEXTS_IN_CHUNK]
        rows = slice(self._starts[index], self._starts[index] + len(self.texts[index].ids))
        features, norm, best = self._read(chunk, "features", ("features", "norm", "best"), rows)
        layers = {}
        for layer in self.layers:
            keys, values = self._read(chunk, f"layer{layer}", ("keys", "values"), rows)
            layers[layer] = keys.transpose(0, 1), values.transpose(0, 1)
        return States(features, norm, best, layers)

    def _read(self, chunk: str, part: str, names: Sequence[str], rows: slice) -> list[Tensor]:
        key = f"{chunk}.{part}"
        if self.folder is None:
            return [self._memory[key][name][rows] for name in names]
        if key not in self._files:
            path = self.folder / f"{key}.safetensors"
            self._files[key] = safe_open(path, "pt")
        return [self._files[key].get_slice(name)[rows] for name in names]

    def _make(self, name: str, texts: Sequence[Text]) -> None:
        parts = ["features", *(f"layer{layer}" for layer in self.layers)]
        if self.folder is not None:
            parts = [p for p in parts if not (self.folder / f"{name}.{p}.safetensors").exists()]
        if not parts:
            return
        made = _compute(self._target, texts, self.layers, self._batch_tokens)
        check_origin(texts, made["features"]["best"])
        for part in parts:
            if self.folder is None:
                self._memory[f"{name}.{part}"] = made[part]
            else:
                write_atomically(self.folder / f"{name}.{part}.safetensors", save(made[part]))


def check_origin(texts: Sequence[Text], best: Tensor) -> None:
    """Refuse texts that another model wrote.

    Args:
        best: `[N]` the target's most probable next token at every position of the texts in turn.
    """
    expected, actual = [], []
    for text, start in zip(texts, _starts(texts), strict=True):
        if text.greedy:
            expected += [text.ids[i + 1] for i in text.trained]
            actual += [start + i for i in text.trained]
    if not expected:
        return
    agreement = (best[actual] == torch.tensor(expected)).float().mean().item()
    if agreement < LEAST_AGREEMENT:
        raise SpecdecError(
            f"the target would have written only {agreement:.0%} of the tokens of the greedy "
            "answers: this data was made with another target. Make data with this one"
        )


@torch.no_grad()
def _compute(
    target: Target, texts: Sequence[Text], layers: Sequence[int], batch_tokens: int
) -> dict[str, dict[str, Tensor]]:
    """States of all texts, one behind the other: `[N, ...]` each."""
    pieces: list[dict[str, Tensor]] = [{} for _ in texts]
    for batch in _by_length(texts, batch_tokens):
        longest = max(len(texts[i].ids) for i in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens[row, : len(texts[i].ids)] = torch.tensor(texts[i].ids)
        cache = SlotCache(len(batch))
        first = torch.zeros(len(batch), 1, dtype=torch.long, device=target.device)
        done = target.forward(
            tokens.to(target.device), cache, [0] * len(batch), keep=first, features=True
        )
        assert done.features is not None
        for row, i in enumerate(batch):
            length = len(texts[i].ids)
            features = done.features[row, :length]
            norm, best = _distributions(target, features, texts[i].trained)
            pieces[i] = {"features": features.cpu(), "norm": norm, "best": best}
            cache.lengths = [longest] * len(batch)
            for layer in layers:
                keys, values = cache.committed(layer)
                pieces[i][f"keys{layer}"] = keys[row, :, :length].transpose(0, 1).cpu()
                pieces[i][f"values{layer}"] = values[row, :, :length].transpose(0, 1).cpu()
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    made = {"features": {name: joined[name] for name in ("features", "norm", "best")}}
    for layer in layers:
        pair = {"keys": joined[f"keys{layer}"], "values": joined[f"values{layer}"]}
        made[f"layer{layer}"] = pair
    return made


def _distributions(target: Target, features: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Normaliser and best token at `positions` of one text, 0 elsewhere."""
    norm = torch.zeros(len(features))
    best = torch.zeros(len(features), dtype=torch.long)
    output = target.model.get_output_embeddings()
    for start in range(0, len(positions), LOGITS_AT_A_TIME):
        part = positions[start : start + LOGITS_AT_A_TIME]
        logits = output(features[part])
        best[part] = logits.max(-1).indices.cpu()
        norm[part] = logits.float().logsumexp(-1).cpu()
    return norm, best


def _by_length(texts: Sequence[Text], batch_tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index].ids)):
        if batch and (len(batch) + 1) * len(texts[index].ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def _starts(texts: Sequence[Text]) -> list[int]:
    starts, total = [], 0
    for text in texts:
        starts.append(total)
        total += len(text.ids)
    return starts


def _fingerprint(target: Target) -> bytes:
    """Tells this target from others: its config, and a sample of each of its weights."""
    mark = hashlib.blake2b(str(target.config.to_json_string()).encode(), digest_size=16)
    for weights in target.model.parameters():
        values = weights.detach().flatten()
        mark.update(values[:: max(1, len(values) // 64)].float().cpu().numpy().tobytes())
    return mark.digest()


def _chunk_name(mark: bytes, texts: Sequence[Text]) -> str:
    name = hashlib.blake2b(mark, digest_size=8)
    for text in texts:
        name.update(repr((text.ids, text.answers)).encode())
    return name.hexdigest()
