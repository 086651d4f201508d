"""Whole KV blocks as bytes: gather, scatter, copy, digest.

The slab is seen as [num_blocks, block_bytes] uint8: a block with all its layers is one row. Called
by kvtransfer (send and receive slots) and by the runner (copy-on-write forks).
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
DIGEST: Op[Callable[[Tensor], Tensor]] = Op(
    "blocks.digest",
    {
        Backend.TORCH: "tandem.kernels.blocks.multilinear:digest",
        Backend.TRITON: f"{_TRITON}:digest",
    },
)


def pack(slab: Tensor, ids: Tensor, out: Tensor, *, backend: Backend | None = None) -> None:
    """Gather blocks: out[i] = slab[ids[i]].

    Args:
        slab: [num_blocks, block_bytes] uint8, dense.
        ids: int64 [n], in range.
        out: [n, block_bytes] uint8, dense; a send slot's payload.
        backend: an explicit choice; by device otherwise.
    """
    _check(slab, ids, out)
    PACK.on(slab.device, backend)(slab, ids, out)


def unpack(packed: Tensor, ids: Tensor, slab: Tensor, *, backend: Backend | None = None) -> None:
    """Scatter blocks: slab[ids[i]] = packed[i]. The ids are distinct; shapes as in `pack`."""
    _check(slab, ids, packed)
    UNPACK.on(slab.device, backend)(packed, ids, slab)


def copy(slab: Tensor, source: Tensor, to: Tensor, *, backend: Backend | None = None) -> None:
    """Copy blocks within the slab: slab[to[i]] = slab[source[i]].

    No destination appears twice or among the sources. `source` and `to` are int64 [n].
    """
    checks.shape("slab", slab, None, None)
    checks.shape("to", to, source.shape[0])
    checks.kind("source", source, torch.int64)
    checks.kind("to", to, torch.int64)
    COPY.on(slab.device, backend)(slab, source, to)


def digest(data: Tensor, *, backend: Backend | None = None) -> int:
    """64-bit digest of dense uint8 `data` of any shape, as an unsigned integer.

    The same on every machine and backend (`blocks/multilinear.py` has the hash). It finds
    accidents, such as torn, stale or misplaced extents, with a miss of about 2^-32; it is no
    defence against a forger.
    """
    checks.kind("data", data, torch.uint8)
    if not data.is_contiguous():
        raise BadTensor(f"data has strides {data.stride()}, expected dense bytes")
    return int(DIGEST.on(data.device, backend)(data.view(-1))) & ((1 << 64) - 1)


def _check(slab: Tensor, ids: Tensor, rows: Tensor) -> None:
    checks.shape("slab", slab, None, None)
    checks.kind("slab", slab, torch.uint8)
    checks.kind("ids", ids, torch.int64)
    checks.shape("packed", rows, ids.shape[0], slab.shape[1])
    checks.kind("packed", rows, torch.uint8)
    for name, tensor in (("slab", slab), ("packed", rows)):
        if not tensor.is_contiguous():
            raise BadTensor(f"{name} has strides {tensor.stride()}, expected dense blocks")
