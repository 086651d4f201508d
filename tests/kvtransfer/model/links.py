"""Sessions and tables of both ends as a world copies and compares them, and steps of tables, each
of which is made once."""

from __future__ import annotations

from typing import TypeVar

from tandem.kvtransfer.handoff.actions import Action
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.link.session import Session

Table = TypeVar("Table", ExportTable, ImportTable)


class Steps:
    """What tables did in a walk: one with the same sign does the same again, and most transitions
    of a walk are steps that one of the two tables has made in another world. Nobody touches a table
    that came from here."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[object, ...]] = {}

    def of(
        self, table: Table, sign: int, name: str, arguments: tuple[object, ...]
    ) -> tuple[Table, int, tuple[Action, ...]]:
        """The table and its sign behind a call of this name, and what that asks for."""
        key = (sign, name, arguments)
        made = self._made.get(key)
        if made is None:
            after = table.copy()
            actions = tuple(getattr(after, name)(*arguments) or ())
            made = self._made[key] = (after, sign_of(after), actions)
        return made  # type: ignore[return-value]


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
    if session is None:
        return None
    return (session.me, session.peer, session.state, session._sent, session._expected)


def sign_of(table: ExportTable | ImportTable) -> int:
    known: tuple[object, ...]
    if isinstance(table, ExportTable):
        known = (*table.exports.items(), *sorted(table.links))
    else:
        known = (*table.pulls.items(), *table.links)
    return hash((known, frozenset(table._hungry), table.ring.snapshot()))
