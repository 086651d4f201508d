"""Messages to the process of grammars, and its answers."""

from __future__ import annotations

import msgspec

from tandem.protocol.structured import StructuredOutputsParams

DONE, ERROR, UNKNOWN = b"D", b"E", b"U"
"""First byte of an answer; an error's text or a state follows."""


class Setup(msgspec.Struct, frozen=True):
    """Settings of the process."""

    folder: str
    """Prepared model, for its tokenizer."""
    vocab_size: int
    memory_bytes: int
    """Memory beyond that of the loaded libraries."""


class Compile(msgspec.Struct, frozen=True):
    """Message to compile a form, or only to load the backend."""

    backend: str
    form: StructuredOutputsParams | None
    seconds: float
    """Processor time."""


class Follow(msgspec.Struct, frozen=True):
    """Message to continue one answer, and return its mask."""

    answer: int
    form: bytes
    """Message ``Compile`` of an answer that is unknown there."""
    tokens: list[int]
    ended: list[int]


class State(msgspec.Struct, frozen=True):
    """Position after the last token, sent after ``DONE``."""

    mask: bytes
    is_accepting: bool
