"""Attention of one new token per sequence over paged KV."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.attention.batch import PagedBatch, check_call
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

Decode = Callable[[Tensor, Tensor, PagedBatch, float], Tensor]

DECODE: Op[Decode] = Op(
    "attention.decode",
    {
        Backend.TORCH: "tandem.kernels.attention.decode.reference:decode",
        Backend.TRITON: "tandem.kernels.attention.decode.triton:decode",
        Backend.GLUON: "tandem.kernels.attention.decode.gluon:decode",
    },
)


def decode(
    q: Tensor, kv: Tensor, batch: PagedBatch, scale: float, *, backend: Backend | None = None
) -> Tensor:
    """softmax(scale * q k^T) v for one query a sequence, which sees all its seq_lens[s] keys.

    Args:
        q: [sequences, heads, head_dim], any strides with a dense last dimension.
        kv: [num_blocks, 2, kv_heads, block_size, head_dim], one layer's strided view of the KV
            cache; the new token's own key and value are in it.
        batch: with max_query_len 1.
        scale: usually head_dim ** -0.5.
        backend: an explicit choice; by device otherwise.

    Returns:
        [sequences, heads, head_dim], dense, of q's dtype.

    Raises:
        BadTensor: shapes, dtypes or strides that do not fit, or more than one query a sequence.
    """
    check_call(q, kv, batch)
    checks.shape("q", q, batch.num_sequences, None, None)
    if batch.max_query_len > 1:
        raise BadTensor(f"max_query_len is {batch.max_query_len}, decode takes 1")
    return DECODE.on(q.device, backend)(q, kv, batch, scale)
