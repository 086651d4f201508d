"""An agent in a thread of this process, and transports that it copies for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.blocks import Blocks, SharedTags
from tandem.kvtransfer.memory.slots import SharedSlots
from tandem.kvtransfer.nodeagent import registrations
from tandem.kvtransfer.nodeagent.registrations import HostRing, Source
from tandem.kvtransfer.nodeagent.server import NodeAgent
from tandem.kvtransfer.transports.agent.landing import LandingSizes
from tandem.kvtransfer.transports.agent.transport import AgentTransport
from tandem.kvtransfer.transports.mapped.copiers import Batch, Copier, HostCopier, Mark
from tandem.memory.shared import shared_tensor
from tandem.protocol.ids import new_incarnation

SLOT = 2 * BYTES
"""Bytes of a landing slot: two blocks, less a page for the header that other slots have."""


class Running:
    """An agent, and the thread that runs it."""

    def __init__(self, folder: Path, group: int | None = None) -> None:
        self._place = folder, group
        self._begin()

    def _begin(self) -> None:
        self.agent = NodeAgent(*self._place)
        self._thread = threading.Thread(target=self.agent.run, daemon=True)
        self._thread.start()

    def again(self) -> None:
        """It ends, and the next one begins."""
        self.stop()
        self._begin()

    def stop(self) -> None:
        self.agent.stop()
        self._thread.join(10.0)
        assert not self._thread.is_alive()


class AgentWorker:
    """A transport over a slab, slots and tags, whose blocks the agent brings."""

    def __init__(
        self,
        folder: Path,
        fill: int,
        *,
        slots: int = 4,
        per_peer: int = 3,
        copier: Copier | None = None,
    ) -> None:
        self.incarnation = new_incarnation()
        self.kv_cache = shared_tensor(BLOCKS * BYTES).fill_(fill).view(BLOCKS, BYTES)
        self.blocks = Blocks(self.kv_cache, SharedTags(BLOCKS))
        self.slots = SharedSlots(4, BYTES)
        config = KVTransferConfig(kv_slot_bytes=SLOT, kv_slots=slots, kv_slots_per_peer=per_peer)
        sizes = LandingSizes(config)
        self.transport = AgentTransport(
            "shm_agent", self.incarnation, copier or HostCopier(), folder, sizes, on_gpu=False
        )

    def serve(self) -> bytes:
        card = self.transport.serve(self.slots, self.blocks)
        assert self.transport._giver is not None
        assert self.transport._giver.registered.wait(10.0)
        return card


class Held:
    """Copies of an agent that land and end when they are told to, whoever still wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.through = False
        self.begun = 0
        monkeypatch.setattr(registrations, "open_ring", self._open)

    def _open(self, where: str, descriptor: int, size: int) -> HostRing:
        assert where == "host"
        return _HeldRing(descriptor, size, self)


class _HeldRing(HostRing):
    def __init__(self, descriptor: int, size: int, held: Held) -> None:
        super().__init__(descriptor, size)
        self._held = held

    def copy(self, source: Source, batch: Batch) -> Mark:
        self._held.begun += 1
        if self._held.through:
            return super().copy(source, batch)
        return _Late(self._held, partial(super().copy, source, batch))


class _Late:
    """Behind a copy that has not landed."""

    due = math.inf

    def __init__(self, held: Held, land: Callable[[], Mark]) -> None:
        self._held, self._land = held, land
        self._landed = False

    def done(self) -> bool:
        if self._held.through and not self._landed:
            self._landed = True
            self._land()
        return self._landed
