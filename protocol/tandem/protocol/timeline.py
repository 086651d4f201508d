"""What a worker saw of one attempt, as it travels to the router: offsets from when it came there.

No time of one host is ever compared with a time of another: the router places a worker's offsets
between its own times of sending the attempt and of hearing the end of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.protocol.ids import RequestKey

MAX_NOTES = 96
"""Notes of one attempt on one worker; further ones are counted only."""


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """Goes with a request whose times are kept."""

    request_id: str
    """The client's name for it, for logs."""
    traceparent: str = ""
    """W3C's header of the span that the worker's spans belong under; empty where none are made."""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or nothing."""
        return self.traceparent[3:35]


class Note(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stretch of a worker's time."""

    name: str
    begin: float
    """Seconds; on the worker's clock until it is sent, then from when the attempt came there."""
    end: float
    amount: int = 0
    """Tokens of a chunk, bytes of a part, how often of the rest."""


class LegTimes(msgspec.Struct, frozen=True, array_like=True):
    """All notes of one attempt from one worker, said once, with its last word."""

    request: str
    attempt: int
    sent: float
    """Seconds from its coming there to the sending of this."""
    notes: tuple[Note, ...] = ()
    dropped: int = 0
    """Notes beyond MAX_NOTES."""


@dataclass(slots=True)
class NoteBook:
    """The notes of one attempt while it runs, on the worker's monotonic clock."""

    key: RequestKey
    watch: Watch
    arrived: float
    notes: list[Note] = field(default_factory=list)
    dropped: int = 0
    why: str = ""
    """How it ended; empty while it runs."""

    def add(self, name: str, begin: float, end: float, amount: int = 0) -> None:
        """Keep one more stretch."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(Note(name, begin, end, amount))
        else:
            self.dropped += 1

    def add_all(self, notes: Iterable[Note]) -> None:
        """Keep what somebody else noted on the same clock."""
        for each in notes:
            self.add(each.name, each.begin, each.end, each.amount)

    def times(self, now: float, others: Iterable[Note] = ()) -> LegTimes:
        """As it is sent at ``now``; ``others`` are of the process, and count where they touch."""
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
