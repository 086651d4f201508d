"""Bytes of each token, if the tokenizer's decoder allows such a table.

Byte-level BPE and SentencePiece with byte fallback do: text is the UTF-8 decoding of the joined
bytes. ``detokenizer`` decodes windows of ids for others.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

MAX_STOP_CHARS = 1024


def check_stops(stops: Sequence[str]) -> None:
    """Raise InvalidParameter for a stop string that is too long."""
    for stop in stops:
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidParameter("stop", stop, f"strings of at most {MAX_STOP_CHARS} characters")


def check_stopping(params: SamplingParams) -> None:
    """Raise InvalidParameter for stop strings of ``params`` that cannot be searched for."""
    check_stops(params.stop)
    if params.stop and not params.detokenize:
        raise InvalidParameter(
            "stop", params.stop, "only with detokenize=true: stop strings are found in text"
        )


class StopMatcher:
    """Search in the text of one choice. ``found`` is the stop string that ended it."""

    __slots__ = ("_held", "_include", "_letters", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._letters = frozenset("".join(stop[:-1] for stop in stops))
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Return the text that may be shown. Not callable once ``found`` is set.

        Unarmed (``min_tokens``), a stop string that ends in ``text`` is ignored.
        """
        if not text:
            return ""
        window = self._held + text
        if armed:
            start, stop = self._first(window)
            if stop is not None:
                self.found = stop
                self._held = ""
                return window[: start + len(stop)] if self._include else window[:start]
        if window[-1] not in self._letters:
            self._held = ""
            return window
        keep = self._may_become(window)
        self._held = window[keep:]
        return window[:keep]

    def end(self) -> str:
        """Return the held text at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _first(self, window: str) -> tuple[int, str | None]:
        best_end, best_start, best = len(window) + 1, 0, None
        held = len(self._held)
        for stop in self._stops:
            start = window.find(stop, max(0, held - len(stop) + 1), best_end)
            if start < 0:
                continue
            end = start + len(stop)
            if end < best_end or start < best_start:
                best_end, best_start, best = end, start, stop
        return best_start, best

    def _may_become(self, window: str) -> int:
        earliest = len(window)
        for stop in self._stops:
            start = max(0, len(window) - len(stop) + 1)
            while (start := window.find(stop[0], start)) >= 0 and start < earliest:
                if stop.startswith(window[start:]):
                    earliest = start
                start += 1
        return earliest


BytesOf = Callable[[str], bytes]

_SPACE = "▁"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip"}


class ByteTable(dict[int, bytes]):
    """Bytes by token id; hidden and unknown ids have none."""

    def __init__(
        self,
        entry_of: Callable[[int], str | None],
        bytes_of: BytesOf,
        hidden: Container[int] = (),
    ) -> None:
        super().__init__()
        self._entry_of = entry_of
        self._bytes_of = bytes_of
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        entry = None if token_id in self._hidden else self._entry_of(token_id)
        self[token_id] = found = b"" if entry is None else self._bytes_of(entry)
        return found


class WholeTexts(dict[int, str | None]):
    """Text by token id if its bytes are whole characters, else None."""

    def __init__(self, table: ByteTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def bytes_rule(decoder: dict[str, Any] | None) -> BytesOf | None:
    """Return the rule of tokenizer.json's ``decoder``; None if tokens depend on each other."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if "ByteFallback" in kinds and _SENTENCEPIECE.issuperset(kinds) and _spaces_only(steps):
        return _sentencepiece
    return None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _spaces_only(steps: list[dict[str, Any]]) -> bool:
    replaced = [(s["pattern"], s["content"]) for s in steps if s["type"] == "Replace"]
    stripped = [s["stop"] for s in steps if s["type"] == "Strip"]
    return replaced == [({"String": _SPACE}, " ")] and not any(stripped)


def _printable_bytes() -> list[int]:
    """Return the bytes that byte-level BPE writes as the character of the same number."""
    return [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_letters() -> dict[str, int]:
    """Return byte-level BPE's alphabet: other bytes follow from U+0100 on."""
    letters = {chr(byte): byte for byte in _printable_bytes()}
    others = sorted(set(range(256)).difference(letters.values()))
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _byte_level(entry: str) -> bytes:
    try:
        return bytes([_LETTERS[letter] for letter in entry])
    except KeyError:
        return entry.encode()


def _sentencepiece(entry: str) -> bytes:
    fallback = _FALLBACK.fullmatch(entry)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    return entry.replace(_SPACE, " ").encode()


REPLACEMENT = "\ufffd"

WINDOW_TOKENS = 16
"""Maximum ids of a window."""
WINDOW_KEEPS = 6
"""Ids that stay as context when a window is cut."""
WINDOW_WAITS = 8
"""Maximum tokens that end in part of a character."""


class Detokenizer(Protocol):
    """Incremental decoder of one choice."""

    def feed(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes; empty for a part of a character."""
        ...

    def end(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character."""
        ...


class TableDetokenizer:
    """Detokenizer for tokens that stand for bytes."""

    __slots__ = ("_pending", "_table", "_whole")

    def __init__(self, table: ByteTable, whole: WholeTexts) -> None:
        self._table = table
        self._whole = whole
        self._pending = b""

    def feed(self, token_id: int) -> str:
        if not self._pending:
            text = self._whole[token_id]
            if text is not None:
                return text
        data = self._pending + self._table[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def end(self) -> str:
        rest, self._pending = self._pending, b""
        return rest.decode(errors="replace")


class WindowDetokenizer:
    """Detokenizer for any tokenizer: decodes a short window of ids.

    ``context`` is the end of the prompt: some decoders treat the first token differently.
    """

    __slots__ = ("_decode", "_shown", "_waiting", "_window")

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-WINDOW_KEEPS:])
        self._shown = decode(self._window)
        self._waiting = 0

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._waiting < WINDOW_WAITS:
            self._waiting += 1
            return ""
        return self._show(text)

    def end(self) -> str:
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
