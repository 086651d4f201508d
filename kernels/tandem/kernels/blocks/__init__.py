"""KV blocks as bytes, whole or in parts of their tokens: gather, scatter, copy, digest.

The KV cache is [num_blocks, block_bytes] uint8: a block with all its layers is one row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

Move = Callable[[Tensor, Tensor, Tensor], None]

_TORCH, _TRITON = "tandem.kernels.blocks.reference", "tandem.kernels.blocks.triton"


def _move(name: str) -> Op[Move]:
    where = {Backend.TORCH: f"{_TORCH}:{name}", Backend.TRITON: f"{_TRITON}:{name}"}
    return Op(f"blocks.{name}", where)


PACK, UNPACK, COPY = _move("pack"), _move("unpack"), _move("copy")
PartMove = Callable[[Tensor, Tensor, Tensor, int], None]
PACK_PARTS: Op[PartMove] = Op("blocks.pack_parts", {Backend.TORCH: f"{_TORCH}:pack_parts"})
UNPACK_PARTS: Op[PartMove] = Op("blocks.unpack_parts", {Backend.TORCH: f"{_TORCH}:unpack_parts"})
DIGEST: Op[Callable[[Tensor, Tensor], None]] = Op(
    "blocks.add_digest",
    {
        Backend.TORCH: "tandem.kernels.blocks.multilinear:add_digest",
        Backend.TRITON: f"{_TRITON}:add_digest",
    },
)


def pack(kv_cache: Tensor, ids: Tensor, out: Tensor, *, backend: Backend | None = None) -> None:
    """Gather blocks: out[i] = kv_cache[ids[i]].

    The KV cache is [num_blocks, block_bytes] uint8, ids int64 [n], out [n, block_bytes] uint8; all
    dense.
    """
    _check(kv_cache, ids, out)
    PACK.on(kv_cache.device, backend)(kv_cache, ids, out)


def unpack(
    packed: Tensor, ids: Tensor, kv_cache: Tensor, *, backend: Backend | None = None
) -> None:
    """Scatter blocks: kv_cache[ids[i]] = packed[i]. The ids are distinct; shapes as in `pack`."""
    _check(kv_cache, ids, packed)
    UNPACK.on(kv_cache.device, backend)(packed, ids, kv_cache)


def pack_parts(
    kv_cache: Tensor, ids: Tensor, out: Tensor, rows: int, *, backend: Backend | None = None
) -> None:
    """Gather parts of blocks: out[i] = part ids[i] % parts of block ids[i] // parts.

    A block is ``rows`` runs of bytes, each of the same tokens; a part is an equal share of each
    run. The KV cache is [num_blocks, block_bytes] uint8, ids int64 [n], out [n, part_bytes] uint8
    on the same device; all dense.
    """
    _check_parts(kv_cache, ids, out, rows)
    PACK_PARTS.on(kv_cache.device, backend)(kv_cache, ids, out, rows)


def unpack_parts(
    packed: Tensor, ids: Tensor, kv_cache: Tensor, rows: int, *, backend: Backend | None = None
) -> None:
    """Scatter parts of blocks as `pack_parts` gathers them. The ids are distinct."""
    _check_parts(kv_cache, ids, packed, rows)
    UNPACK_PARTS.on(kv_cache.device, backend)(packed, ids, kv_cache, rows)


def copy(kv_cache: Tensor, source: Tensor, to: Tensor, *, backend: Backend | None = None) -> None:
    """Copy blocks within the KV cache: kv_cache[to[i]] = kv_cache[source[i]].

    No destination appears twice or among the sources. `source` and `to` are int64 [n].
    """
    checks.shape("kv_cache", kv_cache, None, None)
    checks.shape("to", to, source.shape[0])
    checks.kind("source", source, torch.int64)
    checks.kind("to", to, torch.int64)
    COPY.on(kv_cache.device, backend)(kv_cache, source, to)


def digest(data: Tensor, *, backend: Backend | None = None) -> int:
    """Return the 64-bit digest of dense uint8 `data` of any shape, as an unsigned integer.

    The same on every backend (`blocks/multilinear.py`). It detects accidents with a miss of about
    2^-32, not forgery.
    """
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    add_digest(data, total, backend=backend)
    return int(total) & ((1 << 64) - 1)


def add_digest(data: Tensor, total: Tensor, *, backend: Backend | None = None) -> None:
    """Add `digest` to int64 `total` ([1], on the device of `data`), without waiting for the
    device."""
    checks.kind("data", data, torch.uint8)
    checks.shape("total", total, 1)
    checks.kind("total", total, torch.int64)
    if not data.is_contiguous():
        raise BadTensor(f"data has strides {data.stride()}, expected dense bytes")
    DIGEST.on(data.device, backend)(data.view(-1), total)


def _check_parts(kv_cache: Tensor, ids: Tensor, rows: Tensor, runs: int) -> None:
    checks.shape("kv_cache", kv_cache, None, None)
    checks.shape("packed", rows, ids.shape[0], None)
    for name, tensor in (("kv_cache", kv_cache), ("packed", rows)):
        checks.kind(name, tensor, torch.uint8)
        if not tensor.is_contiguous():
            raise BadTensor(f"{name} has strides {tensor.stride()}, expected dense blocks")
    if kv_cache.shape[1] % rows.shape[1] or rows.shape[1] % runs:
        raise BadTensor(
            f"parts of {rows.shape[1]} bytes in {runs} runs, of blocks of {kv_cache.shape[1]} bytes"
        )


def _check(kv_cache: Tensor, ids: Tensor, rows: Tensor) -> None:
    checks.shape("kv_cache", kv_cache, None, None)
    checks.kind("kv_cache", kv_cache, torch.uint8)
    checks.kind("ids", ids, torch.int64)
    checks.shape("packed", rows, ids.shape[0], kv_cache.shape[1])
    checks.kind("packed", rows, torch.uint8)
    for name, tensor in (("kv_cache", kv_cache), ("packed", rows)):
        if not tensor.is_contiguous():
            raise BadTensor(f"{name} has strides {tensor.stride()}, expected dense blocks")
