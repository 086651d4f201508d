"""Block moves and the digest in Triton, for a KV cache in GPU memory.

One launch moves any number of blocks, on few multiprocessors. Whole large blocks between a GPU and
elsewhere use the copy engines (`reference`), which disturb steps less. Roofline: bytes read plus
bytes written.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import reference
from .multilinear import WORDS, chunk_keys
from .triton_kernels import add_terms, move_rows

_BLOCK = 4096
_MOST = 16
"""Programs that share a row."""


def pack(kv_cache: Tensor, ids: Tensor, out: Tensor) -> None:
    """See the wrapper."""
    if out.device != kv_cache.device:
        reference.pack(kv_cache, ids, out)
    else:
        _move(kv_cache, out, ids, None)


def unpack(packed: Tensor, ids: Tensor, kv_cache: Tensor) -> None:
    """See the wrapper."""
    if packed.device != kv_cache.device:
        reference.unpack(packed, ids, kv_cache)
    else:
        _move(packed, kv_cache, None, ids)


def copy(kv_cache: Tensor, source: Tensor, to: Tensor) -> None:
    """See the wrapper."""
    _move(kv_cache, kv_cache, source, to)


def add_digest(data: Tensor, total: Tensor) -> None:
    """See the wrapper; one launch. Bytes of a partial word are copied to a padded one."""
    num_bytes = data.numel()
    if num_bytes % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -num_bytes % 8))
    words = data.view(torch.int64)
    count = words.numel()
    if count:
        low, high = chunk_keys(str(data.device))
        add_terms[(triton.cdiv(count, WORDS),)](
            words, low, high, total, count, num_bytes, WORDS=WORDS, num_warps=4
        )


def _move(source: Tensor, target: Tensor, gather: Tensor | None, scatter: Tensor | None) -> None:
    ids = gather if gather is not None else scatter
    assert ids is not None, "a move goes by ids on one side at least"
    if not ids.numel():
        return
    source, target = _as_words(source, target)
    words = source.shape[1]
    per_row = min(_MOST, triton.cdiv(words, _BLOCK))
    move_rows[(ids.shape[0], per_row)](
        source,
        target,
        _near(ids if gather is None else gather, source),
        _near(ids if scatter is None else scatter, source),
        words,
        per_row,
        GATHER=gather is not None,
        SCATTER=scatter is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def _as_words(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as int64 if both tensors are aligned to it, else as bytes."""
    aligned = all(t.storage_offset() % 8 == 0 and t.data_ptr() % 8 == 0 for t in (source, target))
    if source.shape[1] % 8 or not aligned:
        return source, target
    return source.view(torch.int64), target.view(torch.int64)


def _near(ids: Tensor, like: Tensor) -> Tensor:
    """Return ids on the device, from pinned memory, as other copies wait for the stream."""
    if ids.device == like.device:
        return ids
    return ids.pin_memory().to(like.device, non_blocking=True)
