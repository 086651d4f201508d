"""Copies of P's blocks into D's of another size or other heads, one run of bytes for each head's
tokens. Pure.

A block is one run for each head of K and V of each layer, of ``head_dim`` numbers a token. Only
common heads are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.transports.base import Check, Extent, Place, Region
from tandem.protocol.layout import DTYPE_BYTES, KVGroup, Shard

Numbers = NDArray[np.int64]


class PartExtents(Sequence[Extent]):
    """Runs of one length; those of a block of P's are adjacent in these lists."""

    def __init__(
        self,
        sources: Numbers,
        targets: Numbers,
        nbytes: int,
        remote_blocks: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """``sources`` and ``targets`` are offsets in P's and D's KV cache; ``ends`` are the numbers
        of extents after which each of ``remote_blocks`` is complete."""
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


class End(NamedTuple):
    """A KV cache: the tokens of its blocks, and the heads in them."""

    block_size: int
    shard: Shard


def part_extents(
    block_ids: Sequence[int],
    remote_blocks: Sequence[int],
    start: int,
    stop: int,
    group: KVGroup,
    mine: End,
    theirs: End,
) -> PartExtents:
    """Return extents of tokens [start, stop) of the common heads, from P's blocks to D's (of
    ``group``). One block size divides the other; ``start`` is a multiple of the smaller."""
    unit = min(mine.block_size, theirs.block_size)
    width = group.head_dim * DTYPE_BYTES[group.dtype]
    num_heads = group.num_kv_heads * mine.shard.size
    here, there = mine.shard.heads(num_heads), theirs.shard.heads(num_heads)
    heads = np.arange(max(here.start, there.start), min(here.stop, there.stop), dtype=np.int64)
    layers = np.arange(2 * group.num_layers, dtype=np.int64)[:, None]
    at = np.arange(start // unit, -(-stop // unit), dtype=np.int64) * unit

    def places(blocks: Sequence[int], size: int, own: range) -> tuple[Numbers, Numbers]:
        """Return the index of the block of each unit, and offsets [units * runs] in the KV
        cache."""
        runs = (layers * len(own) + heads - own.start).reshape(1, -1) * size
        index = at // size - start // size
        block = np.array(blocks, dtype=np.int64)[index] * (2 * group.num_layers * len(own) * size)
        return index, ((block + at % size)[:, None] + runs).reshape(-1) * width

    index, sources = places(remote_blocks, theirs.block_size, there)
    _, targets = places(block_ids, mine.block_size, here)
    runs = len(sources) // len(at)
    ends = (np.flatnonzero(np.diff(index, append=-1)) + 1) * runs - 1
    return PartExtents(sources, targets, unit * width, remote_blocks, ends.tolist())
