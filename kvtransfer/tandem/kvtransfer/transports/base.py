"""What the transfer thread asks of a mover of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from tandem.kvtransfer.mover.memory import SlotMemory
from tandem.protocol.ids import Incarnation

Ticket = NewType("Ticket", int)
"""One read, from ``read`` until ``poll`` says that it is terminal."""


class Progress(Enum):
    """Of a read."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    """Terminal: no byte of it lands any more."""
    UNKNOWN = "unknown"
    """Not terminal and not to be trusted: only quarantine is safe. Said once a read."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a transport is like."""

    name: str
    needs_advance: bool
    """P's transfer thread must call ``advance`` for D's reads to move, wanted ones or not."""
    moves_gpu_memory: bool = False
    """Slots may lie in a GPU's memory at both ends."""


class Transport(Protocol):
    """Called by the transfer thread alone; nothing here blocks for long."""

    traits: Traits

    def serve(self, memory: SlotMemory) -> bytes:
        """P: let peers read these slots. Returns the card that they need for it.

        Raises TransportError.
        """
        ...

    def receive(self, memory: SlotMemory) -> None:
        """D: reads will land in these slots. Raises TransportError."""
        ...

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """D: make reads from this peer possible. Raises TransportError."""
        ...

    def read(self, peer: Incarnation, remote_slot: int, slot: int, nbytes: int) -> Ticket:
        """D: start to bring the first ``nbytes`` of a peer's slot. A fault shows in ``poll``."""
        ...

    def poll(self, ticket: Ticket) -> Progress:
        """How a read stands. After a terminal answer the ticket is forgotten."""
        ...

    def advance(self) -> None:
        """Move what moves only while this process runs the transport."""
        ...

    def filenos(self) -> list[int]:
        """Descriptors that become readable when a read gets on; none: nap and ask."""
        ...

    def close(self, peer: Incarnation) -> None:
        """D: the link is lost. Reads that are not terminal stay pollable."""
        ...

    def stop(self) -> None:
        """Let go of everything; the memory is the owner's again."""
        ...
