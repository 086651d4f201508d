"""One producer's memory as D has it mapped: slab, slots, and the tags of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.kernels.memory.shared import SharedMemory
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import CLEARED, TAG_BYTES, TURN_BYTES
from tandem.kvtransfer.transports.base import Region
from tandem.kvtransfer.transports.mapped.batches import Batch
from tandem.kvtransfer.transports.mapped.copiers import Copier, Source
from tandem.kvtransfer.transports.mapped.wire import Given

Turns = NDArray[np.uint64]


class PeerMemory:
    """Mapped on construction, let go of by ``close``."""

    def __init__(self, given: Given, copier: Copier, block_bytes: int) -> None:
        """The descriptors stay the caller's. Raises TransportError."""
        self.sources: dict[Region, Source] = {}
        self._block_bytes = block_bytes
        slab, slots, tags = given.descriptors
        try:
            self.sources[Region.BLOCKS] = copier.map(slab, given.sizes[0])
            self.sources[Region.SLOTS] = copier.map(slots, given.sizes[1])
            mapping = SharedMemory.given(tags, given.sizes[2]).map(writable=False)
        except TransportError:
            self.close()
            raise
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise TransportError(f"a peer's tags cannot be mapped: {error}") from error
        count = len(mapping) // (TAG_BYTES + TURN_BYTES)
        table = np.frombuffer(mapping, np.uint8, count * TAG_BYTES)
        self._tags: NDArray[np.uint8] | None = table.reshape(count, TAG_BYTES)
        self._turns: Turns | None = np.frombuffer(mapping, np.uint64, count, count * TAG_BYTES)

    def has(self, batch: Batch, target_bytes: int) -> bool:
        """Whether both ends have these bytes, and tags where they are to be read: nothing else may
        be touched."""
        if not batch.fits(source_bytes=self.sources[batch.remote].size, target_bytes=target_bytes):
            return False
        if not batch.tagged:
            return True
        blocks, rest = np.divmod(batch.sources, self._block_bytes)
        return bool(not rest.any() and self._turns is not None and blocks.max() < len(self._turns))

    def turns_of(self, batch: Batch) -> Turns:
        """Of the tags of a batch's blocks, as they are now."""
        assert self._turns is not None, "the peer's memory is mapped"
        return self._turns[batch.sources // self._block_bytes]

    def tags_of(self, batch: Batch, turns: Turns) -> Sequence[bytes]:
        """The tags as they are now, cleared where they are of another turn: P raises a block's turn
        before it changes its tag."""
        assert self._tags is not None, "the peer's memory is mapped"
        tags = self._tags[batch.sources // self._block_bytes]
        same = self.turns_of(batch) == turns
        return [tag.tobytes() if kept else CLEARED for tag, kept in zip(tags, same, strict=True)]

    def close(self) -> None:
        """Unmap; no copy from it is under way."""
        for each in self.sources.values():
            each.close()
        self.sources.clear()
        self._tags = self._turns = None
