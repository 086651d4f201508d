"""What a connection needs to know, and to whom it reports: the requests' sinks and the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import zmq

from tandem.protocol.card import ModelCard
from tandem.protocol.ids import Incarnation
from tandem.protocol.keys import KeyRing
from tandem.protocol.messages import WorkerBeat
from tandem.protocol.outputs import Accepted, BlockEvents, EngineCoreOutput, Failed, Refused
from tandem.router.workers.liveness import LinkTimes

if TYPE_CHECKING:
    from tandem.router.workers.connection import WorkerConnection

LegEvent = EngineCoreOutput | Accepted | Refused | Failed


class Sink(Protocol):
    """Where one worker's events of one key go; called in the loop, never blocks."""

    def receive(self, event: LegEvent) -> None:
        """Take the next event of the key from this worker."""
        ...


class Listener(Protocol):
    """Where a worker's own news go (the pool); called in the loop, never blocks."""

    def on_up(self, connection: WorkerConnection, card: ModelCard) -> None:
        """WELCOME came."""
        ...

    def on_lost(self, connection: WorkerConnection, incarnation: Incarnation, reason: str) -> None:
        """The link ended; every key on it has been failed. Follows ``on_up``, once."""
        ...

    def on_beat(self, connection: WorkerConnection, beat: WorkerBeat) -> None:
        """The worker lives."""
        ...

    def on_blocks(self, connection: WorkerConnection, events: BlockEvents) -> None:
        """Its prefix cache changed."""
        ...

    def on_draining(self, connection: WorkerConnection, grace_ms: int) -> None:
        """It will end within ``grace_ms``."""
        ...


class LinkState(StrEnum):
    """Where a link stands."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"


@dataclass(frozen=True, slots=True)
class LinkContext:
    """What all connections of a router share."""

    zmq: zmq.Context[zmq.Socket[bytes]]
    me: Incarnation
    times: LinkTimes
    dropped: Callable[[str], None]
    """Counts a dropped frame by its reason."""
    curve: KeyRing | None = None
