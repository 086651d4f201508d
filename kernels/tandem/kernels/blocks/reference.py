"""Block moves in plain torch: one memcpy a block."""

from __future__ import annotations

from torch import Tensor


def pack(kv_cache: Tensor, ids: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    for row, block in zip(out, ids.tolist(), strict=True):
        row.copy_(kv_cache[block])


def unpack(packed: Tensor, ids: Tensor, kv_cache: Tensor) -> None:
    """See the wrapper."""
    for row, block in zip(packed, ids.tolist(), strict=True):
        kv_cache[block].copy_(row)


def pack_parts(kv_cache: Tensor, ids: Tensor, out: Tensor, rows: int) -> None:
    """See the wrapper."""
    parts, count = _parts_of(kv_cache, out, rows)
    for row, at in zip(out, ids.tolist(), strict=True):
        row.view(rows, -1).copy_(parts[at // count, :, at % count])


def unpack_parts(packed: Tensor, ids: Tensor, kv_cache: Tensor, rows: int) -> None:
    """See the wrapper."""
    parts, count = _parts_of(kv_cache, packed, rows)
    for row, at in zip(packed, ids.tolist(), strict=True):
        parts[at // count, :, at % count].copy_(row.view(rows, -1))


def _parts_of(kv_cache: Tensor, packed: Tensor, rows: int) -> tuple[Tensor, int]:
    """Return the KV cache as [num_blocks, rows, parts, bytes of a run in a part], and the number of
    parts."""
    count = kv_cache.shape[1] // packed.shape[1]
    return kv_cache.view(kv_cache.shape[0], rows, count, -1), count


def copy(kv_cache: Tensor, source: Tensor, to: Tensor) -> None:
    """See the wrapper."""
    for old, new in zip(source.tolist(), to.tolist(), strict=True):
        kv_cache[new].copy_(kv_cache[old])
