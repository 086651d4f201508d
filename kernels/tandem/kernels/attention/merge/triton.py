"""Merging attention states in Triton. Roofline: bytes of two inputs and one output."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .triton_kernels import merge_rows

_ROWS = 8


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """See the wrapper."""
    out, lse, other, other_lse = (t.contiguous() for t in (out, lse, other, other_lse))
    result, result_lse = torch.empty_like(out), torch.empty_like(lse)
    rows, dim = lse.numel(), out.shape[2]
    if rows:
        merge_rows[(triton.cdiv(rows, _ROWS),)](
            out,
            lse,
            other,
            other_lse,
            result,
            result_lse,
            rows,
            D=dim,
            WIDTH=triton.next_power_of_2(dim),
            ROWS=_ROWS,
        )
    return result, result_lse
