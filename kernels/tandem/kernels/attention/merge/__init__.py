"""Merging attention over one set of keys with attention over another (a shared prefix, parts)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

MERGE: Op[Merge] = Op(
    "attention.merge",
    {
        Backend.TORCH: "tandem.kernels.attention.merge.reference:merge",
        Backend.TRITON: "tandem.kernels.attention.merge.triton:merge",
    },
)


def merge(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Args:
        out, other: [tokens, heads, head_dim], dense; normalised results over each set.
        lse, other_lse: float32 [tokens, heads], dense; natural log of the sum of exponentials of
            the scores, -inf where a set was empty.
        backend: an explicit choice; by device otherwise.

    Returns:
        The merged result, of out's dtype, and its lse. Zero and -inf where both sets were empty.

    Raises:
        BadTensor: shapes or dtypes that do not fit.
    """
    checks.shape("out", out, None, None, None)
    checks.shape("other", other, *out.shape)
    checks.same("other", other, "out", out)
    for name, tensor in (("lse", lse), ("other_lse", other_lse)):
        checks.shape(name, tensor, *out.shape[:2])
        checks.kind(name, tensor, torch.float32)
    return MERGE.on(out.device, backend)(out, lse, other, other_lse)
