"""Bidirectional attention of whole prompts, for encoders, without pages."""

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
    """Return softmax(scale * q k^T) v within each sequence of a concatenated batch.

    q, k and v are [tokens, heads, head_dim] with a dense last dimension. The result is dense, of
    q's dtype; tokens of no sequence have any value. Raises BadTensor.
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
