"""Sessions and tables of both ends as a world copies and compares them."""

from __future__ import annotations

from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
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


def _numbers(session: Session | None) -> tuple[object, ...] | None:
    """What of it counts, comparable."""
    if session is None:
        return None
    return (session.me, session.peer, session.state, session._sent, session._expected)


def p_end(exports: ExportTable, session: Session | None) -> tuple[object, ...]:
    """P's, hashable: equal for ends that behave alike."""
    return (
        tuple(exports.exports.items()),
        frozenset(exports._hungry),
        exports.ring.snapshot(),
        tuple(sorted(exports.links)),
        _numbers(session),
    )


def d_end(imports: ImportTable, session: Session | None) -> tuple[object, ...]:
    """D's, likewise."""
    return (
        tuple(imports.pulls.items()),
        frozenset(imports._hungry),
        imports.ring.snapshot(),
        tuple(imports.links),
        _numbers(session),
    )
