"""P's blocks copied into D's where the two differ in size: a run of bytes for each head's tokens.

A block is one run for each head of K and V of each layer, of ``head_dim`` numbers a token. Where
blocks differ in size, the smaller one's runs lie apart in the larger one. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.transports.base import Check, Extent, Place, Region
from tandem.protocol.layout import DTYPE_BYTES, KVGroup

Numbers = NDArray[np.int64]


class PartExtents(Sequence[Extent]):
    """Runs of one length; those of a block of P's lie one behind the other in these lists."""

    def __init__(
        self,
        sources: Numbers,
        targets: Numbers,
        nbytes: int,
        remote_blocks: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """``sources`` and ``targets`` are offsets in P's and D's slab; with the extents ``ends``
        each of ``remote_blocks`` is through, in their order."""
        self.sources = sources
        self.targets = targets
        self.nbytes = nbytes
        self.remote_blocks = remote_blocks
        self._ends = frozenset(ends)

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, at: int) -> Extent: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Extent]: ...

    def __getitem__(self, at: int | slice) -> Extent | Sequence[Extent]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        local = Place(Region.BLOCKS, int(self.targets[at]))
        remote = Place(Region.BLOCKS, int(self.sources[at]))
        check = Check.TAG if at % len(self) in self._ends else Check.PART
        return Extent(local, remote, self.nbytes, check)


def part_extents(
    block_ids: Sequence[int],
    remote_blocks: Sequence[int],
    start: int,
    stop: int,
    group: KVGroup,
    remote_size: int,
) -> PartExtents:
    """Tokens [start, stop) in P's blocks, of ``remote_size`` tokens each, for those in D's, of
    ``group``; one size divides the other, and ``start`` is a whole number of the smaller."""
    own, unit = group.block_size, min(group.block_size, remote_size)
    width = group.head_dim * DTYPE_BYTES[group.dtype]
    runs = np.arange(group.num_rows, dtype=np.int64)[None, :] * width
    at = np.arange(start // unit, -(-stop // unit), dtype=np.int64) * unit

    def places(blocks: Sequence[int], size: int) -> tuple[Numbers, Numbers]:
        """Index of the block of each unit, and offsets [units, runs] in the slab."""
        index = at // size - start // size
        head = np.array(blocks, dtype=np.int64)[index] * (len(runs[0]) * width * size)
        return index, head[:, None] + (at % size * width)[:, None] + runs * size

    theirs, sources = places(remote_blocks, remote_size)
    _, targets = places(block_ids, own)
    last = np.flatnonzero(np.diff(theirs, append=-1))
    ends = ((last + 1) * len(runs[0]) - 1).tolist()
    return PartExtents(sources.reshape(-1), targets.reshape(-1), unit * width, remote_blocks, ends)
