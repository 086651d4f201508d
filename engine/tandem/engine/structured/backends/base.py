"""Interface of the libraries that follow grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from tandem.protocol.structured import StructuredOutputsParams


class Matcher(Protocol):
    """Position of one answer in its grammar, used by one thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Raises GrammarError if one is not allowed; the matcher is unusable
        then."""
        ...

    def fill(self, words: memoryview) -> None:
        """Write the next token's mask as ceil(vocabulary / 32) int32 words (in bytes): lowest bit
        lowest id, 1 is allowed, without tokens that end the answer. Raises GrammarError."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        ...

    def copy(self) -> Self:
        """Return a matcher at the same position; another thread may use it."""
        ...


class Library(Protocol):
    """One library in a limited process, for one vocabulary."""

    def compile(self, wanted: StructuredOutputsParams, /) -> Matcher:
        """Return the matcher of a form ``prepared`` for the library. Raises any exception."""
        ...


@runtime_checkable
class Grammar(Matcher, Protocol):
    """Matcher as the engine uses it."""

    @property
    def is_terminated(self) -> bool:
        """Return whether the answer can only end here; False if only ``fill`` finds that no token
        is allowed."""
        ...


class GrammarBackend(Protocol):
    """One library for one tokenizer, used by any number of threads."""

    def compile(self, wanted: StructuredOutputsParams, /) -> Grammar:
        """Return the grammar at the start of an answer. Raises GrammarError."""
        ...

    def close(self) -> None:
        """Release resources. May be called twice."""
        ...
