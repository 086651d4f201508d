"""Causal attention of prompt chunks over paged KV, cached context included."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels.attention.batch import PagedBatch, Scores, check_call
from tandem.kernels.registry import Backend, Op

Prefill = Callable[[Tensor, Tensor, PagedBatch, Scores, Tensor | None], Tensor]

PREFILL: Op[Prefill] = Op(
    "attention.prefill",
    {
        Backend.TORCH: "tandem.kernels.attention.prefill.reference:prefill",
        Backend.TRITON: "tandem.kernels.attention.prefill.triton:prefill",
        Backend.GLUON: "tandem.kernels.attention.prefill.gluon:prefill",
    },
)


def prefill(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    scores: Scores,
    kv_scales: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T, causal) v for chunks of any length, over pages already written.

    Query i of sequence s has position seq_lens[s] - query_len[s] + i and attends to keys up to it,
    from its window on. The other rules of `scores` apply, too: a soft cap, sinks, slopes.
    Query head h reads KV head h // (heads / kv_heads). q is [tokens, heads, head_dim] with a dense
    last dimension; kv is one layer's strided view, [num_blocks, 2, kv_heads, block_size, head_dim],
    of q's dtype or float8_e4m3fn codes with `kv_scales` (`attention/__init__.py`). The result is
    dense, of q's dtype. Raises BadTensor.
    """
    check_call(q, kv, batch, kv_scales)
    scores.check(q)
    return PREFILL.on(q.device, backend)(q, kv, batch, scores, kv_scales)
