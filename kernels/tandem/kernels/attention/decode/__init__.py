"""Attention of one new token per sequence over paged KV."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.attention.batch import PagedBatch, Scores, check_call
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

Decode = Callable[[Tensor, Tensor, PagedBatch, Scores, Tensor | None], Tensor]

DECODE: Op[Decode] = Op(
    "attention.decode",
    {
        Backend.TORCH: "tandem.kernels.attention.decode.reference:decode",
        Backend.TRITON: "tandem.kernels.attention.decode.triton:decode",
        Backend.GLUON: "tandem.kernels.attention.decode.gluon:decode",
        Backend.LLVM: "tandem.kernels.attention.decode.llvm:decode",
    },
)


def decode(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    scores: Scores,
    kv_scales: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v for one query a sequence, over its seq_lens[s] keys.

    The other rules of `scores` apply, too: a window, soft cap, sinks, slopes.
    q is [sequences, heads, head_dim] with a dense last dimension. kv is one layer's strided view of
    the KV cache, [num_blocks, 2, kv_heads, block_size, head_dim], with the new token's key and
    value. It has q's dtype, or float8_e4m3fn codes with `kv_scales` (`attention/__init__.py`). The
    result is dense, of q's dtype. Raises BadTensor, also for a batch with max_query_len above 1.
    """
    check_call(q, kv, batch, kv_scales)
    scores.check(q)
    checks.shape("q", q, batch.num_sequences, None, None)
    if batch.max_query_len > 1:
        raise BadTensor(f"max_query_len is {batch.max_query_len}, decode takes 1")
    return DECODE.on(q.device, backend)(q, kv, batch, scores, kv_scales)
