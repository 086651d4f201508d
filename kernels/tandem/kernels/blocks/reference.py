"""Block moves in plain torch: a block is hundreds of KiB, so one memcpy a block is the fastest."""

from __future__ import annotations

from torch import Tensor


def pack(slab: Tensor, ids: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    for row, block in zip(out, ids.tolist(), strict=True):
        row.copy_(slab[block])


def unpack(packed: Tensor, ids: Tensor, slab: Tensor) -> None:
    """See the wrapper."""
    for row, block in zip(packed, ids.tolist(), strict=True):
        slab[block].copy_(row)


def pack_parts(slab: Tensor, ids: Tensor, out: Tensor, rows: int) -> None:
    """See the wrapper."""
    parts, count = _parts_of(slab, out, rows)
    for row, at in zip(out, ids.tolist(), strict=True):
        row.view(rows, -1).copy_(parts[at // count, :, at % count])


def unpack_parts(packed: Tensor, ids: Tensor, slab: Tensor, rows: int) -> None:
    """See the wrapper."""
    parts, count = _parts_of(slab, packed, rows)
    for row, at in zip(packed, ids.tolist(), strict=True):
        parts[at // count, :, at % count].copy_(row.view(rows, -1))


def _parts_of(slab: Tensor, packed: Tensor, rows: int) -> tuple[Tensor, int]:
    """The slab as [num_blocks, rows, parts, bytes of a run in a part], and how many parts."""
    count = slab.shape[1] // packed.shape[1]
    return slab.view(slab.shape[0], rows, count, -1), count


def copy(slab: Tensor, source: Tensor, to: Tensor) -> None:
    """See the wrapper."""
    for old, new in zip(source.tolist(), to.tolist(), strict=True):
        slab[new].copy_(slab[old])
