"""Tokens to text, piece by piece."""

from __future__ import annotations

from typing import Any

INCOMPLETE = "\ufffd"


class TextPieces:
    """Turns a growing list of tokens into pieces of text whose concatenation is the whole text.

    A piece is held back while it ends inside a character, so no replacement character is shown that
    a later token would have completed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.settled = 0
        self.shown = ""

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens complete (possibly none yet)."""
        self.tokens.extend(tokens)
        text = self._tail()
        if text.endswith(INCOMPLETE):
            return ""
        piece = text[len(self.shown) :]
        # Decoding starts again from here next time, with one settled piece before it: tokenizers
        # that put a space before a word look at what stands in front.
        self.settled, self.shown = len(self.tokens) - len(tokens), ""
        self.shown = self._tail()
        return piece

    def end(self) -> str:
        """What was held back."""
        piece = self._tail()[len(self.shown) :]
        self.shown += piece
        return piece

    def _tail(self) -> str:
        return self.tokenizer.decode(
            self.tokens[self.settled :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
