"""Times of one attempt on a worker, sent to the router as offsets from the attempt's arrival.

Times of two hosts are never compared. The router places a worker's offsets between its own times of
sending the attempt and of receiving its end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.ids import RequestKey

MAX_NOTES = 96
"""Notes of one attempt on one worker; further ones are counted only."""


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """Sent with a request whose times are recorded."""

    request_id: str
    """Client's id of the request, for logs."""
    traceparent: str = ""
    """W3C header of the parent span of the worker's spans; empty if tracing is off."""

    @property
    def trace_id(self) -> str:
        """Return the 32 hex digits of the trace; empty without one."""
        return self.traceparent[3:35]


class Note(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One interval of a worker's time."""

    name: str
    begin: float
    """Seconds on the worker's clock. When sent, seconds since the attempt's arrival."""
    end: float
    amount: int = 0
    """Tokens of a chunk, bytes of a part, or number of repeats, by kind."""


class LegTimes(msgspec.Struct, frozen=True, array_like=True):
    """All notes of one attempt from one worker, sent once, with its last message."""

    request: str
    attempt: int
    sent: float
    """Seconds from its arrival to the sending of this."""
    notes: tuple[Note, ...] = ()
    dropped: int = 0
    """Notes beyond MAX_NOTES, not sent."""


@dataclass(slots=True)
class NoteBook:
    """The notes of one attempt while it runs, on the worker's monotonic clock."""

    key: RequestKey
    watch: Watch
    arrived: float
    notes: list[Note] = field(default_factory=list)
    dropped: int = 0
    why: str = ""
    """Reason for its end; empty while it runs."""

    def add(self, name: str, begin: float, end: float, amount: int = 0) -> None:
        """Keep one more interval; count it as dropped beyond MAX_NOTES."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(Note(name, begin, end, amount))
        else:
            self.dropped += 1

    def add_all(self, notes: Iterable[Note]) -> None:
        """Keep notes that other code made on the same clock."""
        for each in notes:
            self.add(each.name, each.begin, each.end, each.amount)

    def times(self, now: float, others: Iterable[Note] = ()) -> LegTimes:
        """Return the times to send at ``now``. ``others`` are the process's notes; those that end
        after the arrival are included."""
        arrived = self.arrived
        kept = [*self.notes, *(each for each in others if each.end > arrived)]
        return LegTimes(
            self.key.request,
            self.key.attempt,
            now - arrived,
            tuple(
                Note(each.name, each.begin - arrived, each.end - arrived, each.amount)
                for each in kept
            ),
            self.dropped,
        )
