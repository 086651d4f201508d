"""Errors of grammars."""

from __future__ import annotations

from tandem.protocol.errors import TandemError


class GrammarError(TandemError):
    """A grammar or a token is refused, or a limit is reached; the text is for the client."""


class ExhaustedError(GrammarError):
    """The state that a library keeps over several answers has reached its limit."""


class NotNow(GrammarError):
    """The grammar may be valid, but cannot be compiled here now."""


class NoBackend(GrammarError):
    """This worker cannot use the backend; the text has the reason."""
