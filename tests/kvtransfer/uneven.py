"""Transports that a test makes stand still for a while."""

from __future__ import annotations

import math
import time
from pathlib import Path

from tests.kvtransfer.memory_transport import MemoryTransport

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.transports.agent.landing import LandingSizes
from tandem.kvtransfer.transports.agent.transport import AgentTransport
from tandem.kvtransfer.transports.base import Progress, Ticket
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.kvtransfer.transports.mapped.transport import MappedTransport
from tandem.kvtransfer.transports.mapped.wire import open_folder
from tandem.kvtransfer.transports.nixl import NixlTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.protocol.ids import new_incarnation


class Uneven:
    """Part of a transport: ``advance`` moves nothing before a moment, at first a past one."""

    until = 0.0
    """On the monotonic clock."""

    def stand(self) -> None:
        self.until = math.inf

    def go_on(self) -> None:
        self.until = 0.0

    def advance(self) -> None:
        if time.monotonic() >= self.until:
            super().advance()  # type: ignore[misc]


class UnevenNixl(Uneven, NixlTransport):
    """A producer's moves nobody's reads while it stands."""

    def __init__(self, role: str = "producer") -> None:
        self.incarnation = new_incarnation()
        super().__init__(self.incarnation, role)


class UnevenTcp(Uneven, TcpTransport):
    """A consumer's says of nothing that it has come while it stands."""

    def __init__(self) -> None:
        super().__init__(new_incarnation(), host="127.0.0.1")

    def poll(self, ticket: Ticket) -> Progress:
        return super().poll(ticket) if time.monotonic() >= self.until else Progress.PENDING


class UnevenBlocks(Uneven, MemoryTransport):
    """A consumer's copies stay pending while it stands."""

    def __init__(self) -> None:
        super().__init__(direct=True)

    def poll(self, ticket: Ticket) -> Progress:
        return super().poll(ticket) if time.monotonic() >= self.until else Progress.PENDING


class UnevenShm(Uneven, MappedTransport):
    """A consumer's copies stay pending while it stands."""

    def __init__(self) -> None:
        place = open_folder(None)
        super().__init__("shm", new_incarnation(), HostCopier(), place, on_gpu=False)

    def poll(self, ticket: Ticket) -> Progress:
        return super().poll(ticket) if time.monotonic() >= self.until else Progress.PENDING


class UnevenAgent(Uneven, AgentTransport):
    """A consumer's copies stay pending while it stands."""

    def __init__(self, folder: Path) -> None:
        sizes = LandingSizes(KVTransferConfig(kv_slot_bytes=4096, kv_slots=4))
        self.incarnation = new_incarnation()
        copier = HostCopier()
        super().__init__("shm_agent", self.incarnation, copier, folder, sizes, on_gpu=False)

    def poll(self, ticket: Ticket) -> Progress:
        return super().poll(ticket) if time.monotonic() >= self.until else Progress.PENDING


def uneven(connector: str, role: str, folder: Path | None = None) -> dict[str, Uneven]:
    """The transport of one worker, in the folder of an agent if there is one."""
    if folder is not None:
        return {connector: UnevenAgent(folder)}
    if connector == "shm":
        return {connector: UnevenShm()}
    if connector == "memory_blocks":
        return {connector: UnevenBlocks()}
    return {connector: UnevenNixl(role) if connector == "nixl" else UnevenTcp()}
