"""Tiny random models, one for each architecture, and what transformers writes with them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

PROMPT = [1, 5, 9, 14, 5, 9, 23, 40]
WINDOW = 8
"""Sliding window of the models that have one: short, so that every text here leaves it behind."""
SOFT_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 50.0}


def build(config: PreTrainedConfig, seed: int, sharpness: float = 20.0) -> PreTrainedModel:
    """A random model in float32.

    Args:
        seed: chosen by hand, so that greedy texts of `PROMPT` and `ragged()` are varied (more than
            12 different tokens in 40) and free of near-ties (the best logit leads by 0.03).
        sharpness: factor on the output layer; another way to keep near-ties away.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_output_embeddings().weight.data *= sharpness
    return model


def llama(seed: int = 8, **changes: Any) -> PreTrainedModel:
    """The target of most tests: a Llama with 64 tokens, two layers and grouped queries."""
    return build(LlamaConfig(**(_sizes() | changes)), seed)


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
        "tie_word_embeddings": False, "initializer_range": 0.4,
    } | more  # fmt: skip


def _two_kinds_of_layers(**more: Any) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return _sizes(
        num_hidden_layers=3, layer_types=kinds, sliding_window=WINDOW, head_dim=8,
        query_pre_attn_scalar=8, **more,
    )  # fmt: skip


def _gpt2() -> PreTrainedModel:
    sizes = _sizes(n_embd=32, n_layer=2, n_head=4, n_positions=512)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "max_position_embeddings"):  # fmt: skip
        del sizes[name]
    return build(GPT2Config(**sizes), seed=4)


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "qwen2": lambda: build(Qwen2Config(**_sizes()), seed=10),
    "qwen3": lambda: build(Qwen3Config(**_sizes(head_dim=8)), seed=8),
    "mistral": lambda: build(MistralConfig(**_sizes(sliding_window=WINDOW, head_dim=8)), seed=10),
    "gpt_neox": lambda: build(GPTNeoXConfig(**_sizes(rotary_pct=0.5)), seed=1),
    "gpt2": _gpt2,
    "gemma2": lambda: build(Gemma2Config(**_two_kinds_of_layers(**SOFT_CAPS)), seed=8, sharpness=5),
    "gemma3": lambda: build(Gemma3TextConfig(**_two_kinds_of_layers()), seed=7, sharpness=5),
    "phi3": lambda: build(Phi3Config(**_sizes(sliding_window=WINDOW)), seed=3),
    "opt": lambda: build(OPTConfig(**_sizes(ffn_dim=48, word_embed_proj_dim=32)), seed=5),
}


@functools.cache
def architecture(name: str) -> PreTrainedModel:
    """One of `ARCHITECTURES`, the same object for all tests: leave it as it is."""
    return ARCHITECTURES[name]()


def noisy(model: PreTrainedModel, eps: float, seed: int = 1) -> PreTrainedModel:
    """A copy with `eps` standard deviations of noise on every parameter; 0 is the model's twin."""
    torch.manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            # A constant parameter (a norm's scale) has no spread of its own.
            spread = weight.std(correction=0) + 0.01
            weight += eps * spread * torch.randn_like(weight)
    return twin


def plain(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, **arguments: Any
) -> list[int]:
    """The new tokens of transformers' own greedy `generate`, for one prompt."""
    if not arguments:
        return list(_plain(model, tuple(prompt), max_new_tokens))
    return _written(model, prompt, max_new_tokens, arguments)


@functools.cache
def _plain(model: PreTrainedModel, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    # Many tests write the same text.
    return _written(model, list(prompt), max_new_tokens, {})


def _written(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, arguments: dict[str, Any]
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    arguments = {"eos_token_id": None, "pad_token_id": 0} | arguments
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
        **arguments,
    )  # fmt: skip
    return written[0, len(prompt) :].tolist()


def ragged(count: int = 3, vocab_size: int = 64) -> list[list[int]]:
    """Prompts of different lengths, one of them a single token."""
    draw = torch.Generator().manual_seed(7)
    lengths = [1, 8, 3, 21, 13][:count]
    return [torch.randint(1, vocab_size, (n,), generator=draw).tolist() for n in lengths]


def left_padded(prompts: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """The prompts as a tokenizer returns them for a decoder-only model."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(row)) + row for row in prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
