"""One producer's memory as D has it mapped: slab, slots, and the tags of its blocks."""

from __future__ import annotations

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.base import Region
from tandem.kvtransfer.transports.mapped.batches import Batch, Numbers
from tandem.kvtransfer.transports.mapped.copiers import Copier, Source
from tandem.kvtransfer.transports.mapped.tags import PeerTags, Turns
from tandem.kvtransfer.transports.mapped.wire import Given


class PeerMemory:
    """Mapped on construction, unmapped by ``close``."""

    def __init__(self, given: Given, copier: Copier, block_bytes: int) -> None:
        """The descriptors stay the caller's. Raises TransportError."""
        self.sources: dict[Region, Source] = {}
        self._block_bytes = block_bytes
        self._tags: PeerTags | None = None
        slab, slots, tags = given.descriptors
        try:
            self.sources[Region.BLOCKS] = copier.map(slab, given.sizes[0])
            self.sources[Region.SLOTS] = copier.map(slots, given.sizes[1])
            self._tags = PeerTags(tags, given.sizes[2])
        except TransportError:
            self.close()
            raise

    def has(self, batch: Batch, target_bytes: int) -> bool:
        """Return whether both ends have these bytes, and tags if required. No others may be
        touched."""
        if not batch.fits(source_bytes=self.sources[batch.remote].size, target_bytes=target_bytes):
            return False
        if not batch.tagged:
            return True
        known = 0 if self._tags is None else len(self._tags)
        if batch.reach is not None:
            return batch.reach.source_stop <= known * self._block_bytes
        whole = batch.blocks is not None or not (batch.sources % self._block_bytes).any()
        blocks = self._blocks(batch)
        return bool(whole and blocks.min() >= 0 and blocks.max() < known)

    def turns_of(self, batch: Batch) -> Turns:
        """Return the current turns of the tags of a batch's blocks."""
        assert self._tags is not None, "the peer's memory is mapped"
        return self._tags.turns_of(self._blocks(batch))

    def tags_of(self, batch: Batch, turns: Turns) -> bytes:
        """Return the current tags, cleared if their turn has changed."""
        assert self._tags is not None, "the peer's memory is mapped"
        return self._tags.tags_of(self._blocks(batch), turns)

    def _blocks(self, batch: Batch) -> Numbers:
        """Return the blocks whose tags are read."""
        return batch.sources // self._block_bytes if batch.blocks is None else batch.blocks

    def close(self) -> None:
        """Unmap; no copy from it is under way."""
        for each in self.sources.values():
            each.close()
        self.sources.clear()
        self._tags = None
