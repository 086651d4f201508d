"""A transport over memory that other processes could map."""

from __future__ import annotations

from pathlib import Path

from tandem.kvtransfer.memory.blocks import Blocks, SharedTags
from tandem.kvtransfer.memory.slots import SharedSlots
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.kvtransfer.transports.mapped.transport import MappedTransport
from tandem.memory.shared import shared_tensor
from tandem.protocol.ids import RequestKey, new_incarnation

BLOCKS, BYTES = 8, 4096
TAG = b"t" * 16
KEY = RequestKey(b"R" * 16, "r", 0)
SECONDS = 60.0


class Worker:
    """A transport over a slab, slots and tags that other processes could map."""

    def __init__(self, folder: Path, fill: int) -> None:
        self.incarnation = new_incarnation()
        self.garbage = 0
        self.kv_cache = shared_tensor(BLOCKS * BYTES).fill_(fill).view(BLOCKS, BYTES)
        self.blocks = Blocks(self.kv_cache, SharedTags(BLOCKS))
        self.slots = SharedSlots(2, BYTES)
        self.transport = MappedTransport(
            "shm", self.incarnation, HostCopier(), folder, on_gpu=False, on_garbage=self.count
        )

    def count(self) -> None:
        self.garbage += 1
