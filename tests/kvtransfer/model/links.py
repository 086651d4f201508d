"""Sessions of both ends as a world copies and compares them."""

from __future__ import annotations

from tandem.link.session import Session


def copied_session(session: Session | None) -> Session | None:
    """An independent session in the same state."""
    if session is None:
        return None
    other = type(session).__new__(type(session))
    other.terms, other.me, other.peer, other.why = session.terms, session.me, session.peer, ""
    other.state, other.alive = session.state, session.alive
    other._sent, other._expected = session._sent, session._expected
    return other


def numbers(session: Session | None) -> tuple[object, ...] | None:
    """What of it counts, comparable."""
    if session is None:
        return None
    return (session.me, session.peer, session.state, session._sent, session._expected)
