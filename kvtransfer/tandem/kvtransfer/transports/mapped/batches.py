"""Extents of one read as arrays, so that hundreds of blocks are checked and joined at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import TAG_BYTES, TURN_BYTES
from tandem.kvtransfer.transports.base import (
    BlockExtents,
    Check,
    Extent,
    Region,
)
from tandem.kvtransfer.transports.parts import PartExtents
from tandem.memory.shared import SharedMemory, check_touched

Numbers = NDArray[np.int64]
Turns = NDArray[np.uint64]


class PeerTags:
    """Tags of a peer, mapped on construction as long as a reference exists."""

    def __init__(self, descriptor: int, size: int) -> None:
        """The descriptor stays the caller's. Raises TransportError, also for missing pages, which
        reading would add to this process."""
        try:
            check_touched(descriptor, size)
            mapping = SharedMemory.given(descriptor, size).map(writable=False)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"a peer's tags cannot be mapped: {error}") from error
        count = len(mapping) // (TAG_BYTES + TURN_BYTES)
        table = np.frombuffer(mapping, np.uint8, count * TAG_BYTES)
        self._tags: NDArray[np.uint8] = table.reshape(count, TAG_BYTES)
        self._turns: Turns = np.frombuffer(mapping, np.uint64, count, count * TAG_BYTES)

    def __len__(self) -> int:
        return len(self._turns)

    def turns_of(self, blocks: Numbers) -> Turns:
        """Return the current turns of the blocks' tags."""
        return self._turns[blocks]

    def tags_of(self, blocks: Numbers, turns: Turns) -> bytes:
        """Return the current tags, concatenated, cleared if their turn has changed. P raises a
        block's turn before it changes its tag."""
        tags, now = self._tags[blocks], self._turns[blocks]
        if now.tobytes() != turns.tobytes():
            tags[now != turns] = 0
        return tags.tobytes()


MOST_BLOCKS = 512
"""Usual upper bound of the blocks of one read."""
LARGE_BYTES = 4 << 20
"""Size from which joining ranges makes copies no faster."""


class Reach(NamedTuple):
    """Bounds of the ranges at both ends."""

    source: int
    source_stop: int
    target: int
    target_stop: int


class Batch(NamedTuple):
    """Extents between one region of P and one of D; offsets and sizes in bytes."""

    remote: Region
    local: Region
    sources: Numbers
    targets: Numbers
    sizes: Numbers
    tagged: bool
    """Whether tags are to be read: of ``blocks``, or, without these, of each extent as a block."""
    blocks: Numbers | None = None
    """P's blocks that these are, or of which they are the parts."""
    reach: Reach | None = None
    """Bounds of whole blocks, if they are known without a check of each."""

    def joined(self) -> Batch:
        """Return a batch with adjacent ranges joined, except large ones."""
        if self.sizes[0] >= LARGE_BYTES:
            return self
        stops, ends = self.sources + self.sizes, self.targets + self.sizes
        apart = (self.sources[1:] != stops[:-1]) | (self.targets[1:] != ends[:-1])
        first = np.concatenate(([0], np.flatnonzero(apart) + 1))
        sizes = np.add.reduceat(self.sizes, first)
        return self._replace(sources=self.sources[first], targets=self.targets[first], sizes=sizes)

    def fits(self, *, source_bytes: int, target_bytes: int) -> bool:
        """Return whether both regions contain all of these bytes."""
        if self.reach is not None:
            reach = self.reach
            read = 0 <= reach.source < reach.source_stop <= source_bytes
            return read and 0 <= reach.target < reach.target_stop <= target_bytes
        return bool(
            self.sources.min() >= 0
            and self.targets.min() >= 0
            and (self.sources + self.sizes).max() <= source_bytes
            and (self.targets + self.sizes).max() <= target_bytes
        )


@lru_cache(maxsize=8)
def _equal(size: int, count: int) -> Numbers:
    return np.full(count, size, dtype=np.int64)


def batches(extents: Sequence[Extent]) -> list[Batch]:
    """Return the extents grouped by region, those whose tags are read in their order."""
    if not extents:
        return []
    if isinstance(extents, BlockExtents):
        size, theirs, mine = extents.block_bytes, extents.remote_blocks, extents.block_ids
        blocks = np.array(
            (theirs, mine), dtype=np.int64
        )  # one array instead of two, as numpy's calls are slow
        sources, targets = blocks * size
        sizes = _equal(size, max(MOST_BLOCKS, len(extents)))[: len(extents)]
        # Bounds of lists are faster than those of arrays.
        reach = Reach(
            min(theirs) * size, (max(theirs) + 1) * size, min(mine) * size, (max(mine) + 1) * size
        )
        there, here = Region.BLOCKS, Region.BLOCKS
        return [Batch(there, here, sources, targets, sizes, True, blocks[0], reach)]
    if isinstance(extents, PartExtents):
        sources, targets = extents.sources, extents.targets
        sizes = np.full(len(extents), extents.nbytes, dtype=np.int64)
        blocks = np.array(extents.remote_blocks, dtype=np.int64)
        return [Batch(Region.BLOCKS, Region.BLOCKS, sources, targets, sizes, True, blocks)]
    grouped: dict[tuple[Region, Region, bool], list[tuple[int, int, int]]] = {}
    for local, remote, nbytes, check in extents:
        kind = (remote.region, local.region, check is Check.TAG)
        grouped.setdefault(kind, []).append((remote.offset, local.offset, nbytes))
    found = []
    for (there, here, tagged), rows in grouped.items():
        sources, targets, sizes = np.array(rows, dtype=np.int64).T
        found.append(Batch(there, here, sources, targets, sizes, tagged=tagged))
    return found
