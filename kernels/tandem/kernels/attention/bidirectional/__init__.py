"""Attention of whole prompts to themselves, every token to every other: what encoders compute.

No pages: keys and values are those of the call and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

Bidirectional = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]

BIDIRECTIONAL: Op[Bidirectional] = Op(
    "attention.bidirectional",
    {
        Backend.TORCH: "tandem.kernels.attention.bidirectional.reference:bidirectional",
        Backend.TRITON: "tandem.kernels.attention.bidirectional.triton:bidirectional",
    },
)


def bidirectional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scale: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v within each sequence of a batch laid end to end.

    Args:
        q: [tokens, heads, head_dim], any strides with a dense last dimension.
        k: the same shape.
        v: the same shape.
        cu_seqlens: int32 [sequences + 1]: sequence s is rows cu_seqlens[s] up to the next.
        max_len: tokens of the longest sequence, or a bound of it.
        scale: usually head_dim ** -0.5.
        backend: an explicit choice; by device otherwise.

    Returns:
        [tokens, heads, head_dim], dense, of q's dtype.

    Raises:
        BadTensor: shapes, dtypes or strides that do not fit.
    """
    checks.shape("q", q, None, None, None)
    checks.dense_last("q", q)
    for name, tensor in (("k", k), ("v", v)):
        checks.shape(name, tensor, *q.shape)
        checks.same(name, tensor, "q", q)
        checks.dense_last(name, tensor)
    checks.shape("cu_seqlens", cu_seqlens, None)
    checks.kind("cu_seqlens", cu_seqlens, torch.int32)
    if cu_seqlens.shape[0] < 1 or max_len < 0:
        raise BadTensor(
            f"cu_seqlens has {cu_seqlens.shape[0]} entries and max_len is {max_len}, expected at "
            "least 1 and 0"
        )
    return BIDIRECTIONAL.on(q.device, backend)(q, k, v, cu_seqlens, max_len, scale)
