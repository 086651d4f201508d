"""The interface of the libraries that follow grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from tandem.protocol.structured import StructuredOutputsParams


class Matcher(Protocol):
    """The position of one answer in its grammar. Used by one thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Raises GrammarError if one is not allowed; it is of no use then."""
        ...

    def fill(self, words: memoryview) -> None:
        """Write the mask of the next token into ceil(vocabulary / 32) int32 words, given as bytes:
        the lowest bit is the lowest id, 1 is allowed, tokens that end the answer are not. Raises
        GrammarError."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        ...

    def copy(self) -> Self:
        """Return a matcher at the same position; another thread may use it."""
        ...


class Library(Protocol):
    """One library in a process that limits it, for one vocabulary."""

    def compile(self, wanted: StructuredOutputsParams, /) -> Matcher:
        """Return the matcher of a form, as ``prepared`` for the library. Raises any exception."""
        ...


@runtime_checkable
class Grammar(Matcher, Protocol):
    """A matcher as the engine uses it."""

    @property
    def is_terminated(self) -> bool:
        """Return whether the answer can only end here; False if that is not known before ``fill``,
        which allows no token then."""
        ...


class GrammarBackend(Protocol):
    """One library, for one tokenizer. Used by any number of threads."""

    def compile(self, wanted: StructuredOutputsParams, /) -> Grammar:
        """Return the grammar at the start of an answer. Raises GrammarError."""
        ...

    def close(self) -> None:
        """Release what it holds. May be called twice."""
        ...
