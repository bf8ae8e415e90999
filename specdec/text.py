"""Between text and tokens: a conversation to token ids, and tokens to text, piece by piece."""

from __future__ import annotations

from typing import Any

from specdec.errors import SpecdecError

INCOMPLETE = "\ufffd"


class TextPieces:
    """Turns a growing list of tokens into pieces of text whose concatenation is the whole text.

    The last character is held back while its bytes are not all there, so no replacement character
    is shown that a later token would have completed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        # Not everything is decoded each time, only the tokens from `start` on, whose text begins
        # with `shown`. Pieces ended at `start` and at `ended`: there no character is cut, and
        # the piece between them stands in front of what comes next, because tokenizers that put a
        # space before a word look at what stands in front.
        self.start = self.ended = 0
        self.shown = ""

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens complete (possibly none yet)."""
        self.tokens.extend(tokens)
        text = self._decode()
        piece = self._show(text.rstrip(INCOMPLETE))
        if piece and not text.endswith(INCOMPLETE):
            self.start, self.ended = self.ended, len(self.tokens)
            self.shown = self._decode()
        return piece

    def end(self) -> str:
        """What was held back."""
        return self._show(self._decode())

    def _show(self, text: str) -> str:
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece

    def _decode(self) -> str:
        return self.tokenizer.decode(
            self.tokens[self.start :],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )


def encode(tokenizer: Any, messages: list[dict[str, str]], chat: bool | None) -> list[int]:
    """Token ids of a conversation.

    Args:
        messages: `[{"role": "user", "content": ...}, ...]`.
        chat: whether to write them with the chat template; None does where there is one. Without it
            the messages' texts are simply put one after the other.

    Raises:
        SpecdecError: no tokenizer, or no chat template where one is asked for.
    """
    if tokenizer is None:
        raise SpecdecError("target.model: it has no tokenizer, and a prompt in text needs one.")
    if chat is None:
        chat = bool(tokenizer.chat_template)
    if not chat:
        return tokenizer("".join(message["content"] for message in messages))["input_ids"]
    if not tokenizer.chat_template:
        raise SpecdecError("--chat: the target's tokenizer has no chat template; use --no-chat.")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
