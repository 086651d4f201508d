"""What a backend of structured output gives: a compiler, and grammars that follow one answer
each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, runtime_checkable

from tandem.protocol.errors import TandemError
from tandem.protocol.structured import StructuredOutputsParams

Waits = Callable[[bool], None]
"""Told by a compiling thread that its text waits for others before it, and that it no longer
does."""


def untold(_waits: bool) -> None:
    """Nobody wants to know."""


class GrammarError(TandemError):
    """The backend refuses the text, or a token, or gave up: its words."""


class ExhaustedError(GrammarError):
    """What the backend finds out about a text, and keeps over answers, has grown to its bound."""


class NotNow(GrammarError):
    """No fault of the text: the same may be taken later, or by another worker."""


class NoCompiler(GrammarError):
    """This worker has no structured output at all: the reason."""


@runtime_checkable
class Grammar(Protocol):
    """Where one answer stands in its grammar. One thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """The answer went on by these tokens. Raises GrammarError for one that is not allowed; the
        grammar is of no use then."""
        ...

    def fill(self, words: memoryview) -> None:
        """Write which tokens may come next into int32 words of 32 tokens each, the lowest bit the
        lowest id: ``words`` are ceil(vocabulary / 32) of them, as bytes. Ends of the model's are
        the caller's to add where ``is_accepting``. Raises GrammarError when it takes too much."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether it can only end here. False where that is not known yet: then ``fill`` leaves no
        token."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        ...

    def reset(self) -> None:
        """Back to an empty answer. What the backend found out on the way stays: a later answer may
        meet ExhaustedError where it would be far from that alone."""
        ...

    def copy(self) -> Self:
        """Another answer that stands where this one does: both may be in use, by a thread each."""
        ...


class Compiler(Protocol):
    """Makes grammars for one tokenizer. Any number of threads."""

    @property
    def is_preparing(self) -> bool:
        """Whether a text waits for something that is made once, and that no later one waits for."""
        ...

    def compile(self, wanted: StructuredOutputsParams, waits: Waits = untold, /) -> Grammar:
        """The grammar of an empty answer; ``waits`` is told of turns that the text waits for.
        Raises GrammarError in words for whoever wrote it."""
        ...

    def close(self) -> None:
        """End what it has beside this process, whatever is being compiled. May be called twice."""
        ...
