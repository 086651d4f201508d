"""Spans of one attempt on this worker, from its notes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tandem.link.spans import OpenSpan, Spans
from tandem.protocol.timeline import Note, NoteBook

_HANDOFF = ("wait", "reserve", "load", "commit")
_ENDED_BADLY = ("abort", "error")


def write_spans(spans: Spans, role: str, book: NoteBook, now: float, stops: Sequence[Note]) -> None:
    """Queue, chunks, hand-off with its parts, decoding; stops and preemptions are events."""
    offset = time.time() - time.monotonic()
    notes = {each.name: each for each in book.notes}
    whole = spans.begin(role, book.arrived + offset, book.watch.traceparent)
    for each in book.notes:
        if each.name == "chunk":
            tokens = {"tandem.num_tokens": each.amount}
            whole.child("chunk", each.begin + offset, attributes=tokens).end(each.end + offset)
        elif each.name == "preempted":
            whole.event("preempted", each.begin + offset)
    if "wait" in notes:
        _write_handoff(whole, book, offset)
    elif (queue := notes.get("queue")) is not None:
        whole.child("queue", queue.begin + offset).end(queue.end + offset)
    decode = notes.get("decode")
    if decode is not None and role == "decode":
        span = whole.child("tokens", decode.begin + offset)
        span.event("first token", decode.begin + offset)
        span.end(decode.end + offset, {"gen_ai.usage.output_tokens": decode.amount})
    for stop in stops:
        if stop.end > book.arrived:
            seconds = {"tandem.seconds": stop.end - stop.begin}
            whole.event("stood still", stop.begin + offset, seconds)
    said: dict[str, str | int] = {
        "tandem.request_id": book.watch.request_id,
        "tandem.attempt": book.key.attempt,
        "tandem.finish": book.why,
    }
    failed = book.why if book.why in _ENDED_BADLY else None
    whole.end(now + offset, said, failed)


def _write_handoff(whole: OpenSpan, book: NoteBook, offset: float) -> None:
    stretches = [each for each in book.notes if each.name in _HANDOFF]
    begin, end = min(each.begin for each in stretches), max(each.end for each in stretches)
    handoff = whole.child("hand-off", begin + offset)
    for each in stretches:
        handoff.child(each.name, each.begin + offset).end(each.end + offset)
    for part in book.notes:
        if part.name == "part":
            rate = part.amount / max(part.end - part.begin, 1e-9)
            said = {"tandem.bytes": part.amount, "tandem.bytes_per_s": rate}
            handoff.event("part", part.end + offset, said)
    handoff.end(end + offset, {"tandem.bytes": sum(e.amount for e in stretches)})
