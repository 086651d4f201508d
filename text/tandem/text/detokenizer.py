"""Incremental detokenization that never returns part of a character.

``TableDetokenizer`` is for tokenizers whose tokens are bytes (see ``pieces``). A token costs one
dictionary look-up, less than half the time of the tokenizers package's own DecodeStream. Its texts
joined equal the one-shot decoding, also for invalid UTF-8 and a cut-off end, for which DecodeStream
waits for ever. ``WindowDetokenizer`` is for all other tokenizers. One object per choice; made by
``Tokenizer.detokenizer``.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.text.pieces import ByteTable, WholeTexts

REPLACEMENT = "\ufffd"

WINDOW_TOKENS = 16
"""Length above which a window is cut. Decoders look back a few tokens only."""
WINDOW_KEEPS = 6
"""Tokens that stay as context when a window is cut."""
WINDOW_WAITS = 8
"""Number of tokens that may end in part of a character; more than any character has bytes."""


class Detokenizer(Protocol):
    """Incremental decoder of one choice."""

    def feed(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, often empty for a part of a character."""
        ...

    def end(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character."""
        ...


class TableDetokenizer:
    """Detokenizer for tokenizers whose tokens stand for bytes."""

    __slots__ = ("_pending", "_table", "_whole")

    def __init__(self, table: ByteTable, whole: WholeTexts) -> None:
        self._table = table
        self._whole = whole
        self._pending = b""

    def feed(self, token_id: int) -> str:
        """Return the text as ``Detokenizer.feed``."""
        if not self._pending:
            text = self._whole[token_id]
            if text is not None:
                return text
        data = self._pending + self._table[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def end(self) -> str:
        """Return the rest as ``Detokenizer.end``."""
        rest, self._pending = self._pending, b""
        return rest.decode(errors="replace")


class WindowDetokenizer:
    """Detokenizer for any tokenizer: decodes a short window of ids and returns the added text.

    ``context`` is the end of the prompt. Some decoders treat the first token differently (a word
    without its space); with a context the answer's first token is not the first.
    """

    __slots__ = ("_decode", "_shown", "_waiting", "_window")

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-WINDOW_KEEPS:])
        self._shown = decode(self._window)
        self._waiting = 0

    def feed(self, token_id: int) -> str:
        """Return the text as ``Detokenizer.feed``."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._waiting < WINDOW_WAITS:
            self._waiting += 1
            return ""
        return self._show(text)

    def end(self) -> str:
        """Return the rest as ``Detokenizer.end``."""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        grown = text[len(self._shown) :]
        self._waiting = 0
        if grown:
            self._shown = text
        if len(self._window) > WINDOW_TOKENS:
            self._window = self._window[-WINDOW_KEEPS:]
            self._shown = self._decode(self._window)
        return grown
