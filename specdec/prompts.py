"""Prompts in every form that `generate` takes, as one list of token ids a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.target import Target


def read_prompts(prompt: Any, attention_mask: Any, target: Target) -> list[list[int]]:
    """Token ids of each row, without padding.

    Raises:
        SpecdecError: an empty prompt, ids outside the vocabulary, text without a tokenizer, a form
            that is not known, a mask that does not fit, or a prompt that is longer than the target's
            context.
    """
    if isinstance(prompt, Mapping):
        prompt, attention_mask = _unpack(prompt, attention_mask)
    masked = attention_mask is not None
    rows = _masked(prompt, attention_mask) if masked else _rows(prompt, target)
    for index, row in enumerate(rows):
        _check_row(index, row, target)
    return rows


def _unpack(given: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """The ids and the mask of what a tokenizer returned."""
    others = set(given) - {"input_ids", "attention_mask", "token_type_ids"}
    if "input_ids" not in given or others:
        raise SpecdecError(
            f"prompt: a mapping needs input_ids and may have attention_mask; found {set(given)}."
        )
    kinds = given.get("token_type_ids")
    if kinds is not None and bool(torch.as_tensor(kinds).any()):
        raise SpecdecError("prompt: token_type_ids other than 0 are not supported; leave them out.")
    return given["input_ids"], given.get("attention_mask", attention_mask)


def _masked(prompt: Any, attention_mask: Any) -> list[list[int]]:
    """The rows without the tokens that the mask hides (left or right padding)."""
    try:
        ids, mask = torch.as_tensor(prompt), torch.as_tensor(attention_mask)
    except (TypeError, ValueError):
        ids, mask = torch.zeros(0), torch.ones(0)
    if ids.shape != mask.shape or ids.dim() not in (1, 2) or ids.is_floating_point():
        raise SpecdecError(
            "attention_mask: it comes with token ids `[B, L]`, and has their shape; found "
            f"{_shape(prompt)} and {_shape(attention_mask)}."
        )
    ids, mask = torch.atleast_2d(ids), torch.atleast_2d(mask)
    return [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _rows(prompt: Any, target: Target) -> list[list[int]]:
    if isinstance(prompt, str):
        return [_encode(prompt, target)]
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (1, 2) or prompt.is_floating_point():
            raise SpecdecError(
                f"prompt: a tensor of token ids has one or two dimensions; found "
                f"{tuple(prompt.shape)}, {prompt.dtype}."
            )
        return [prompt.tolist()] if prompt.dim() == 1 else _masked(prompt, _guess(prompt, target))
    if not isinstance(prompt, list | tuple) or not prompt:
        raise SpecdecError(
            "prompt: give text, a list of texts, token ids, a list of id lists, or what a tokenizer "
            f"returns; found {'nothing' if prompt in ([], ()) else type(prompt).__name__}."
        )
    if all(isinstance(each, int) for each in prompt):
        return [list(prompt)]
    if all(isinstance(each, str) for each in prompt):
        return [_encode(each, target) for each in prompt]
    rows = [each.tolist() if isinstance(each, Tensor) else each for each in prompt]
    if all(isinstance(row, list | tuple) and all(isinstance(n, int) for n in row) for row in rows):
        return [list(row) for row in rows]
    raise SpecdecError("prompt: a list holds texts, token ids, or lists of token ids; no mixture.")


def _guess(rows: Tensor, target: Target) -> Tensor:
    """transformers' rule: without a mask, pad tokens are padding unless they also end a text."""
    pad = getattr(target.model.generation_config, "pad_token_id", None)
    eos = target.default_eos
    ends = eos if isinstance(eos, list) else [eos]
    return torch.ones_like(rows) if pad is None or pad in ends else (rows != pad).long()


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
