"""Bytes of each token, if the tokenizer's decoder allows such a table.

Two families of decoders map every token to bytes on its own, so that text is the UTF-8 decoding of
the joined bytes: byte-level BPE (Llama 3, Qwen, SmolLM2, GPT-2) and SentencePiece with byte
fallback (Llama 2, Mistral, Gemma). For these a token costs a dictionary look-up. Other decoders
have no table, and ``detokenizer`` decodes windows of ids instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

BytesOf = Callable[[str], bytes]
"""Function from a vocabulary entry's text to its bytes."""

_SPACE = "▁"
"""Character that SentencePiece writes for a space."""
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip"}


class ByteTable(dict[int, bytes]):
    """Bytes by token id, filled on demand; hidden and unknown ids have none."""

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
    """Return the rule of tokenizer.json's ``decoder``. None if tokens depend on each other."""
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
    """Return whether only SentencePiece's space is replaced, and only leading text is stripped."""
    replaced = [(s["pattern"], s["content"]) for s in steps if s["type"] == "Replace"]
    stripped = [s["stop"] for s in steps if s["type"] == "Strip"]
    return replaced == [({"String": _SPACE}, " ")] and not any(stripped)


def _printable_bytes() -> list[int]:
    """Return the bytes that byte-level BPE writes as the character of the same number."""
    return [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_letters() -> dict[str, int]:
    """Return byte-level BPE's alphabet: the other bytes follow, in order, from U+0100 on."""
    letters = {chr(byte): byte for byte in _printable_bytes()}
    others = sorted(set(range(256)).difference(letters.values()))
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _byte_level(entry: str) -> bytes:
    """Return the bytes of an entry: UTF-8 for one outside the alphabet (added tokens)."""
    try:
        return bytes([_LETTERS[letter] for letter in entry])
    except KeyError:
        return entry.encode()


def _sentencepiece(entry: str) -> bytes:
    fallback = _FALLBACK.fullmatch(entry)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    return entry.replace(_SPACE, " ").encode()
