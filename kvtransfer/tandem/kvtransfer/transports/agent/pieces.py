"""A read cut into pieces, each of which one landing slot takes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tandem.kvtransfer.transports.agent.wire import MAX_PLACES
from tandem.kvtransfer.transports.base import Extent
from tandem.kvtransfer.transports.mapped.batches import Batch, batches


def pieces_of(extents: Sequence[Extent], slot_bytes: int) -> list[Batch]:
    """Return batches of ranges of one size each, in the order of the extents. None is larger
    than a slot; blocks are never cut."""
    found: list[Batch] = []
    for batch in batches(extents):
        for part in (batch,) if batch.tagged else _lone(batch, slot_bytes):
            most = max(1, min(MAX_PLACES, slot_bytes // int(part.sizes[0])))
            if len(part.sizes) <= most:
                found.append(part)
                continue
            starts = range(0, len(part.sizes), most)
            found += [_sliced(part, slice(first, first + most)) for first in starts]
    return found


def landed(piece: Batch, slot: int, slot_bytes: int) -> Batch:
    """Return the piece as it lies in a landing slot: its ranges joined."""
    sources = slot * slot_bytes + np.concatenate(([0], np.cumsum(piece.sizes)[:-1]))
    return piece._replace(sources=sources, reach=None)


def _lone(batch: Batch, slot_bytes: int) -> Iterator[Batch]:
    """Return a batch for each range, and for each slot's length of it."""
    for row in range(len(batch.sizes)):
        size = int(batch.sizes[row])
        for begin in range(0, size, slot_bytes):
            one = _sliced(batch, slice(row, row + 1))
            yield one._replace(
                sources=one.sources + begin,
                targets=one.targets + begin,
                sizes=np.array([min(slot_bytes, size - begin)], dtype=np.int64),
            )


def _sliced(batch: Batch, at: slice) -> Batch:
    return batch._replace(
        sources=batch.sources[at],
        targets=batch.targets[at],
        sizes=batch.sizes[at],
        blocks=None if batch.blocks is None else batch.blocks[at],
        reach=None,
    )
