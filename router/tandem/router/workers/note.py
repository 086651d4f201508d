"""Facts that discovery knows of a worker in addition to its address."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """Facts of a pod; the defaults are those of an address in a list."""

    pod: str = ""
    role: str = ""
    revision: str = ""
    """Of the role's template; several may run side by side during a rollout."""
    admitted: bool = False
    """Whether the worker's revision may serve users."""
    leaving: bool = False
    """Whether the worker is about to end: place nothing new there."""

    @property
    def template(self) -> tuple[str, str]:
        """Return role and revision, the unit of admission."""
        return (self.role, self.revision)


NO_NOTE = WorkerNote()

Admitted = frozenset[tuple[str, str]] | None
"""Templates that serve users; None is all of them, since nobody said anything."""


def admitted_templates(notes: Iterable[WorkerNote]) -> Admitted:
    """Return the admitted templates of all known pods, also of those that are not up; None if none
    is."""
    return frozenset(note.template for note in notes if note.admitted) or None
