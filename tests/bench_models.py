"""A tiny target with a tokenizer and a chat template, and a drafter for it, in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.tiny import build, noisy

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", chat_template=TEMPLATE
    )
    return tokenizer


def save_models(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Folders of a `target` and of a `drafter` that is right most of the time."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    target = build(config, seed=8).to(dtype)
    places = {}
    for name, model in (("target", target), ("drafter", noisy(target, 0.05))):
        places[name] = str(folder / name)
        model.save_pretrained(places[name])
        tokenizer.save_pretrained(places[name])
    return places


def write_questions(path: Path, per_category: int = 2) -> Path:
    """Spec-Bench's form: two MT-Bench categories with two turns, and two others."""
    rows: list[dict[str, Any]] = []
    for category, turns in (("writing", 2), ("coding", 2), ("qa", 1), ("rag", 1)):
        for number in range(per_category):
            text = f"{category} {number}: what is {number} and {number}?"
            rows.append(
                {"question_id": len(rows), "category": category, "turns": [text, "Why?"][:turns]}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
