"""Extents of one read as arrays of numbers: hundreds of blocks are checked and joined at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.transports.base import BlockExtents, Check, Extent, Region
from tandem.kvtransfer.transports.parts import PartExtents

Numbers = NDArray[np.int64]

LARGE_BYTES = 4 << 20
"""Ranges of so many bytes are copied as fast one by one."""


class Batch(NamedTuple):
    """Extents between one region of P and one of D; offsets and sizes in bytes."""

    remote: Region
    local: Region
    sources: Numbers
    targets: Numbers
    sizes: Numbers
    tagged: bool
    """Whether tags are to be read: of ``blocks``, or, without these, of each as a block."""
    blocks: Numbers | None = None
    """P's blocks of which these are the parts."""

    def joined(self) -> Batch:
        """With neighbours at both ends as one range: fewer and larger copies. Of large ranges it
        is itself."""
        if self.sizes[0] >= LARGE_BYTES:
            return self
        stops, ends = self.sources + self.sizes, self.targets + self.sizes
        apart = (self.sources[1:] != stops[:-1]) | (self.targets[1:] != ends[:-1])
        first = np.concatenate(([0], np.flatnonzero(apart) + 1))
        sizes = np.add.reduceat(self.sizes, first)
        return self._replace(sources=self.sources[first], targets=self.targets[first], sizes=sizes)

    def fits(self, *, source_bytes: int, target_bytes: int) -> bool:
        """Whether both regions have all of these bytes."""
        return bool(
            self.sources.min() >= 0
            and self.targets.min() >= 0
            and (self.sources + self.sizes).max() <= source_bytes
            and (self.targets + self.sizes).max() <= target_bytes
        )


def batches(extents: Sequence[Extent]) -> list[Batch]:
    """The extents by their regions, those whose tags are read in their order."""
    if not extents:
        return []
    if isinstance(extents, BlockExtents):
        size = extents.block_bytes
        sources = np.array(extents.remote_blocks, dtype=np.int64) * size
        targets = np.array(extents.block_ids, dtype=np.int64) * size
        sizes = np.full(len(extents), size, dtype=np.int64)
        return [Batch(Region.BLOCKS, Region.BLOCKS, sources, targets, sizes, tagged=True)]
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
