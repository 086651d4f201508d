"""Notes of where a watched request's time went in this engine; others pay a comparison."""

from __future__ import annotations

from tandem.engine.request import Request, RequestGroup
from tandem.protocol.timeline import Note, NoteBook


def note_chunk(request: Request, start: int, end: int, now: float) -> None:
    """A step over prompt tokens [start, end) is through. It began when the one before it ended,
    or when the request's first tokens were planned."""
    group = request.group
    book = group.notes
    if book is None:
        return
    began = group.scheduled if group.scheduled is not None else now
    for each in reversed(book.notes):
        if each.name in ("chunk", "load"):
            began = max(began, each.end)
            break
    book.add("chunk", min(began, now), now, end - start)


def note_preemption(request: Request, now: float) -> None:
    """Its blocks were taken: what was computed is computed again."""
    if request.group.notes is not None:
        request.group.notes.add("preempted", now, now, 1)


def closed(group: RequestGroup, why: str, now: float) -> NoteBook:
    """All notes of a request that ended at ``now``."""
    book = group.notes
    assert book is not None, "only watched requests have notes"
    scheduled, first = group.scheduled, group.first_token
    book.why = why
    # Beyond any bound: two, and the whole hangs by them.
    begun = now if scheduled is None else scheduled
    book.notes.append(Note("queue", group.arrival, begun))
    if first is not None:
        book.notes.append(Note("decode", first, now, group.num_generated))
    return book
