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


def copy(slab: Tensor, source: Tensor, to: Tensor) -> None:
    """See the wrapper."""
    for old, new in zip(source.tolist(), to.tolist(), strict=True):
        slab[new].copy_(slab[old])
