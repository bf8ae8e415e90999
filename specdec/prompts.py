"""Prompts in every form that `generate` takes, as one list of token ids a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.target import Target


def read_prompts(prompt: Any, attention_mask: Tensor | None, target: Target) -> list[list[int]]:
    """Token ids of each row, without padding.

    Raises:
        SpecdecError: an empty prompt, ids outside the vocabulary, text without a tokenizer, a form
            that is not known, or a prompt that is longer than the target's context.
    """
    if isinstance(prompt, Mapping):
        given = set(prompt) - {"input_ids", "attention_mask", "token_type_ids"}
        if "input_ids" not in prompt or given:
            raise SpecdecError(
                f"prompt: a mapping needs input_ids and may have attention_mask; found {set(prompt)}."
            )
        attention_mask = prompt.get("attention_mask", attention_mask)
        prompt = prompt["input_ids"]
    rows = _rows(prompt, attention_mask, target)
    for index, row in enumerate(rows):
        _check_row(index, row, target)
    return rows


def unpad(ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows of `ids [B, L]` without the tokens that the mask hides (left or right padding)."""
    if attention_mask is None:
        return ids.tolist()
    if attention_mask.shape != ids.shape:
        raise SpecdecError(
            f"attention_mask: its shape {tuple(attention_mask.shape)} is not that of the ids "
            f"{tuple(ids.shape)}."
        )
    return [row[mask.bool()].tolist() for row, mask in zip(ids, attention_mask, strict=True)]


def _rows(prompt: Any, attention_mask: Tensor | None, target: Target) -> list[list[int]]:
    if isinstance(prompt, str):
        return [_encode(prompt, target)]
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (1, 2) or prompt.is_floating_point():
            raise SpecdecError(
                f"prompt: a tensor of token ids has one or two dimensions; found "
                f"{tuple(prompt.shape)}, {prompt.dtype}."
            )
        rows = prompt[None] if prompt.dim() == 1 else prompt
        if attention_mask is not None and attention_mask.dim() == 1:
            attention_mask = attention_mask[None]
        return unpad(rows, attention_mask if attention_mask is not None else _guess(rows, target))
    if not isinstance(prompt, list | tuple) or not prompt:
        raise SpecdecError(
            "prompt: give text, a list of texts, token ids, a list of id lists, or what a tokenizer "
            f"returns; found {'nothing' if prompt in ([], ()) else type(prompt).__name__}."
        )
    if isinstance(prompt[0], int):
        return _rows(torch.tensor(prompt), attention_mask, target)
    if attention_mask is not None:
        return _rows(torch.as_tensor(prompt), torch.as_tensor(attention_mask), target)
    if all(isinstance(each, str) for each in prompt):
        return [_encode(each, target) for each in prompt]
    if all(isinstance(each, list | tuple | Tensor) for each in prompt):
        return [list(map(int, each)) for each in prompt]
    raise SpecdecError("prompt: a list holds either texts or token ids, not a mixture.")


def _guess(rows: Tensor, target: Target) -> Tensor | None:
    """transformers' rule: without a mask, pad tokens are padding unless they also end a text."""
    config = target.model.generation_config
    pad = None if config is None else config.pad_token_id
    eos = target.default_eos
    ends = eos if isinstance(eos, list) else [eos]
    if pad is None or pad in ends or not bool((rows == pad).any()):
        return None
    return rows != pad


def _encode(text: str, target: Target) -> list[int]:
    if target.tokenizer is None:
        raise SpecdecError(
            "prompt: text needs a tokenizer, and the target was given without one; pass token ids, "
            "or tokenizer=... to SpeculativeDecoder."
        )
    return target.tokenizer(text)["input_ids"]


def _check_row(index: int, row: list[int], target: Target) -> None:
    if not row:
        raise SpecdecError(f"prompt {index}: it is empty; give at least one token.")
    low, high = min(row), max(row)
    if low < 0 or high >= target.vocab_size:
        raise SpecdecError(
            f"prompt {index}: token ids must lie in 0 to {target.vocab_size - 1}; found "
            f"{low if low < 0 else high}."
        )
    if target.max_positions is not None and len(row) > target.max_positions:
        raise SpecdecError(
            f"prompt {index}: it has {len(row)} tokens, and the target's context is "
            f"{target.max_positions}; shorten it."
        )
