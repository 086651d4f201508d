"""Ids to text, one by one, without ever showing half a character.

``TableDetokenizer`` serves tokenizers whose tokens are bytes (see ``pieces``): a token costs one
dictionary look-up, under half of what the tokenizers package's own DecodeStream takes, and its
texts joined are exactly the one-shot decoding, also of invalid UTF-8 and of a cut-off end, where
DecodeStream waits for ever. ``WindowDetokenizer`` serves all others. One object per choice; made by
``Tokenizer.detokenizer``.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.text.pieces import ByteTable, WholeTexts

REPLACEMENT = "\ufffd"

WINDOW_TOKENS = 16
"""A window is cut when it is longer; decoders look no further back than a few tokens."""
WINDOW_KEEPS = 6
"""Tokens that stay as context when a window is cut."""
WINDOW_WAITS = 8
"""Tokens that may end in half a character; more than any character has bytes."""


class Detokenizer(Protocol):
    """Text of one choice as its tokens come."""

    def feed(self, token_id: int) -> str:
        """Text that ``token_id`` completes, often empty for a part of a character."""
        ...

    def end(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        ...


class TableDetokenizer:
    """For tokenizers whose tokens stand for bytes."""

    __slots__ = ("_pending", "_table", "_whole")

    def __init__(self, table: ByteTable, whole: WholeTexts) -> None:
        self._table = table
        self._whole = whole
        self._pending = b""

    def feed(self, token_id: int) -> str:
        """See Detokenizer."""
        if not self._pending:
            text = self._whole[token_id]
            if text is not None:
                return text
        data = self._pending + self._table[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def end(self) -> str:
        """See Detokenizer."""
        rest, self._pending = self._pending, b""
        return rest.decode(errors="replace")


class WindowDetokenizer:
    """For any tokenizer: decodes a short window of ids and shows what it has grown by.

    ``context`` is the end of the prompt, so that decoders which treat a first token in a special
    way (a word without its space) do not take the answer's first token for one.
    """

    __slots__ = ("_decode", "_shown", "_waiting", "_window")

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-WINDOW_KEEPS:])
        self._shown = decode(self._window)
        self._waiting = 0

    def feed(self, token_id: int) -> str:
        """See Detokenizer."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._waiting < WINDOW_WAITS:
            self._waiting += 1
            return ""
        return self._show(text)

    def end(self) -> str:
        """See Detokenizer."""
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
