"""A tiny chat model, data that it wrote, and configurations to train drafters for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.training.data import DataConfig

WORDS = [f"w{i}" for i in range(60)]
SPECIAL = ["<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_chat_model(path: Path, spread: float = 0.4, seed: int = 0) -> Path:
    """A random model; the smaller the spread of its weights, the sooner it repeats itself."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", *SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", unk_token="<unk>",
        additional_special_tokens=SPECIAL[1:], chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=spread, eos_token_id=1, bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def data_config(target: Path, out: Path, **changes: Any) -> DataConfig:
    defaults = {
        "target": {"model": str(target), "dtype": "float32"}, "out": out, "answer_tokens": 400,
        "shard_size": 8, "batch_size": 4, "max_question": 12, "max_answer": 40,
        "opened_share": 0.0, "second_turn_share": 0.5,
    }  # fmt: skip
    return DataConfig.model_validate({**defaults, **changes})
