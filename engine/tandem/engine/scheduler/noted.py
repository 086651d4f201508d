"""Notes of the time of a watched request in this engine; other requests cost a comparison."""

from __future__ import annotations

from tandem.engine.request import Request, RequestGroup
from tandem.protocol.timeline import Note, NoteBook


def note_chunk(request: Request, start: int, end: int, now: float) -> None:
    """Note the end of a step over prompt tokens [start, end). It began when the step before it
    ended, or when the request's first tokens were planned."""
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
    """Note that its blocks were taken, so that its tokens are computed again."""
    if request.group.notes is not None:
        request.group.notes.add("preempted", now, now, 1)


def closed(group: RequestGroup, why: str, now: float) -> NoteBook:
    """Return all notes of a request that ended at ``now``."""
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
