"""The context that a connection uses, and the receiver of a request's events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.link.session import Terms
from tandem.link.sockets import Context
from tandem.protocol.keys import KeyRing
from tandem.protocol.outputs import Accepted, EngineOutput, Failed, Refused
from tandem.protocol.timeline import LegTimes

LegEvent = EngineOutput | Accepted | Refused | Failed


class Sink(Protocol):
    """Receiver of one worker's events of one key; called in the loop, never blocks."""

    def receive(self, event: LegEvent) -> None:
        """Take the next event of the key from this worker."""
        ...

    def timed(self, times: LegTimes) -> None:
        """Take the worker's notes of the key."""
        ...


@dataclass(frozen=True, slots=True)
class LinkContext:
    """State that all connections of a router share."""

    zmq: Context
    terms: Terms
    dropped: Callable[[str], None]
    """Counts a dropped frame by its reason."""
    curve: KeyRing | None = None
