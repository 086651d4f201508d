"""Times of one attempt on a worker, as offsets from its arrival.

Clocks of two hosts are never compared.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.ids import RequestKey

MAX_NOTES = 96
"""Maximum notes of an attempt on a worker; further ones are counted."""


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """Request to record times."""

    request_id: str
    """Client's id, for logs."""
    traceparent: str = ""
    """W3C header of the parent span; empty if tracing is off."""

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]


class Note(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Interval of a worker's time."""

    name: str
    begin: float
    """Seconds on the worker's clock; in messages, since the attempt's arrival."""
    end: float
    amount: int = 0
    """Tokens of a chunk, bytes of a part, or number of repeats, by kind."""


class LegTimes(msgspec.Struct, frozen=True, array_like=True):
    """Notes of one attempt from one worker, sent with its last message."""

    request: str
    attempt: int
    sent: float
    """Seconds from its arrival to the sending."""
    notes: tuple[Note, ...] = ()
    dropped: int = 0


@dataclass(slots=True)
class NoteBook:
    """Notes of one running attempt, on the worker's monotonic clock."""

    key: RequestKey
    watch: Watch
    arrived: float
    notes: list[Note] = field(default_factory=list)
    dropped: int = 0
    why: str = ""
    """Reason for its end."""

    def add(self, name: str, begin: float, end: float, amount: int = 0) -> None:
        """Keep one interval, or count it beyond MAX_NOTES."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(Note(name, begin, end, amount))
        else:
            self.dropped += 1

    def add_all(self, notes: Iterable[Note]) -> None:
        for each in notes:
            self.add(each.name, each.begin, each.end, each.amount)

    def times(self, now: float, others: Iterable[Note] = ()) -> LegTimes:
        """Return the times to send at ``now``. ``others``: the process's notes since the
        arrival.
        """
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
