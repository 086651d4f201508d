"""Errors of grammars."""

from __future__ import annotations

from tandem.protocol.errors import TandemError


class GrammarError(TandemError):
    """A grammar or a token is refused, or a limit is reached; its text is for the client."""


class ExhaustedError(GrammarError):
    """The state that a library keeps over several answers has reached its limit."""


class NotNow(GrammarError):
    """The grammar may be valid: it may be compiled later, or by another worker."""


class NoBackend(GrammarError):
    """This worker cannot use the backend; its text says why."""
