"""What discovery knows of a worker beside its address."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """Of a pod; the defaults are those of an address in a list."""

    pod: str = ""
    revision: str = ""
    """Of the role's template; several may run side by side during a rollout."""
    admitted: bool = False
    """Its revision may serve users."""
    leaving: bool = False
    """It is about to end: place nothing new there."""


NO_NOTE = WorkerNote()


def admitted_revisions(notes: Iterable[WorkerNote]) -> frozenset[str] | None:
    """Revisions that serve users; None is all of them, since nobody said anything."""
    return frozenset(note.revision for note in notes if note.admitted) or None
