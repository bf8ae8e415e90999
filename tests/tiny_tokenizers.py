"""Small tokenizers of the three kinds whose text depends on what stands in front of a token."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdec.text import INCOMPLETE
from tests.tiny import llama

TEXT = [
    "the cat sat on the mat, and the dog sat on the log.",
    "zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "猫がマットの上に座った。 😀😃 naïve café déjà vu",
    "def f(x):\n    return x + 1  # one more\n",
]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


def byte_level(size: int = 320) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama-3 and Qwen: tokens are bytes and cut through characters."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    raw.train_from_iterator(TEXT[:2], trainer)
    return _wrapped(raw)


@functools.cache
def speaking_llama() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A Llama that writes whole characters, and its tokenizer; the same objects for all tests."""
    tokenizer = byte_level()
    model = llama(seed=5, vocab_size=len(tokenizer))
    for token in range(len(tokenizer)):
        if not tokenizer.decode([token]).replace(INCOMPLETE, "\n").isprintable() or token < len(
            SPECIAL
        ):
            model.lm_head.weight.data[token] = 0
    return model, tokenizer


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama-2, Mistral and Gemma: a space before words, bytes for unknown characters."""
    words = ["▁the", "▁cat", "▁sat", "▁on", "▁mat", "▁", ",", ".", "▁dog", "é", "a", "b", "s", "▁a"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    ids = {name: index for index, name in enumerate(names)}
    raw = Tokenizer(models.BPE(ids, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence(
        [spaces[0], decoders.ByteFallback(), decoders.Fuse(), spaces[1]]
    )
    return _wrapped(raw)


def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT: words with a space between them, `##` continues a word."""
    words = ["the", "cat", "##s", "sat", "##ting", "on", "mat", ",", ".", "##é", "un", "##der"]
    ids = {name: index for index, name in enumerate([*SPECIAL, *words])}
    raw = Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece(cleanup=False)
    return _wrapped(raw)


def _wrapped(raw: Tokenizer) -> PreTrainedTokenizerFast:
    pad, bos, eos, unknown = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
