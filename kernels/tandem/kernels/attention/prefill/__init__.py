"""Causal attention of prompt chunks over paged KV, cached context included."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, check_call
from tandem.kernels.registry import Backend, Op

Prefill = Callable[[Tensor, Tensor, PagedBatch, float], Tensor]

PREFILL: Op[Prefill] = Op(
    "attention.prefill",
    {
        Backend.TORCH: "tandem.kernels.attention.prefill.reference:prefill",
        Backend.TRITON: "tandem.kernels.attention.prefill.triton:prefill",
        Backend.GLUON: "tandem.kernels.attention.prefill.gluon:prefill",
    },
)


def prefill(
    q: Tensor, kv: Tensor, batch: PagedBatch, scale: float, *, backend: Backend | None = None
) -> Tensor:
    """softmax(scale * q k^T, causal) v for chunks of any length, over pages already written.

    Query i of sequence s stands at position seq_lens[s] - query_len[s] + i and sees the keys up to
    its own. GQA: query head h reads KV head h // (heads / kv_heads).

    Args:
        q: [tokens, heads, head_dim], any strides with a dense last dimension.
        kv: [num_blocks, 2, kv_heads, block_size, head_dim], one layer's strided view of the KV
            cache; this call's own keys and values are in it.
        batch: whose queries they are.
        scale: usually head_dim ** -0.5.
        backend: an explicit choice; by device otherwise.

    Returns:
        [tokens, heads, head_dim], dense, of q's dtype.

    Raises:
        BadTensor: shapes, dtypes or strides that do not fit.
    """
    check_call(q, kv, batch)
    return PREFILL.on(q.device, backend)(q, kv, batch, scale)
