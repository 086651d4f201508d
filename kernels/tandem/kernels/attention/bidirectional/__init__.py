"""Attention of whole prompts to themselves, every token to every other: what encoders compute.

No pages: keys and values are those of the call and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.attention.bidirectional.prompts import WholePrompts
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

__all__ = ["BIDIRECTIONAL", "WholePrompts", "bidirectional"]

Bidirectional = Callable[[Tensor, Tensor, Tensor, WholePrompts, float], Tensor]

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
    prompts: WholePrompts,
    scale: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v within each sequence of a batch laid end to end.

    Args:
        q: [tokens, heads, head_dim], any strides with a dense last dimension.
        k: the same shape.
        v: the same shape.
        prompts: the sequences; layers of one step share it, and the plan that is made of it.
        scale: usually head_dim ** -0.5.
        backend: an explicit choice; by device otherwise.

    Returns:
        [tokens, heads, head_dim], dense, of q's dtype. Tokens of no sequence have any value.

    Raises:
        BadTensor: shapes, dtypes or strides that do not fit.
    """
    checks.shape("q", q, None, None, None)
    checks.dense_last("q", q)
    for name, tensor in (("k", k), ("v", v)):
        checks.shape(name, tensor, *q.shape)
        checks.same(name, tensor, "q", q)
        checks.dense_last(name, tensor)
    starts, longest = prompts.cu_seqlens, prompts.max_len
    checks.shape("cu_seqlens", starts, None)
    checks.kind("cu_seqlens", starts, torch.int32)
    if starts.shape[0] < 1 or longest < 0:
        raise BadTensor(
            f"cu_seqlens has {starts.shape[0]} entries and max_len is {longest}, expected at "
            "least 1 and 0"
        )
    return BIDIRECTIONAL.on(q.device, backend)(q, k, v, prompts, scale)
