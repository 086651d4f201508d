"""Facts of a worker from discovery, in addition to its address."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """Facts of a pod; the defaults are those of an address in a list."""

    pod: str = ""
    role: str = ""
    revision: str = ""
    """Revision of the role's template; several may run at the same time during a rollout."""
    admitted: bool = False
    """Set if the worker's revision may serve users."""
    leaving: bool = False
    """Set if the worker is about to end: place nothing new on it."""

    @property
    def template(self) -> tuple[str, str]:
        """Return role and revision, the unit of admission."""
        return (self.role, self.revision)


NO_NOTE = WorkerNote()

Admitted = frozenset[tuple[str, str]] | None
"""Templates that serve users; None is all of them, if no pod is marked as admitted."""


def admitted_templates(notes: Iterable[WorkerNote]) -> Admitted:
    """Return the admitted templates of all known pods, up or not; None if none is."""
    return frozenset(note.template for note in notes if note.admitted) or None
