"""Launches of the kernels that round rows of x to e4m3."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent

from . import BLOCK
from .triton_kernels import round_normed_rows, round_rows

ROWS = 4
"""Divisor of the rows whose scales cuBLAS and tensor descriptors take."""


class RoundedRows(NamedTuple):
    """Rows of x in e4m3, with rows added up to a multiple of ``ROWS``, whose content is
    undefined."""

    codes: Tensor
    """float8_e4m3fn [rows, in]."""
    scales: Tensor
    """float32 [blocks of in, rows], or [1, rows] with one for each row."""


def rounded_rows(x: Tensor, *, by_row: bool, gated: bool = False) -> RoundedRows:
    """Return x [rows, in] rounded, with a scale for each row, or for each of its blocks.

    ``gated`` rounds silu(first half) * second half of x [rows, 2 * in].
    """
    rows, inner = x.shape[0], x.shape[1] // (2 if gated else 1)
    found = _empty(x, inner, by_row)
    width = triton.next_power_of_2(inner) if by_row else BLOCK
    at_once = 1 if by_row else min(16, triton.next_power_of_2(rows))
    round_rows[(triton.cdiv(rows, at_once), 1 if by_row else found.scales.shape[0])](
        x,
        found.codes,
        found.scales,
        rows,
        inner,
        x.stride(0),
        found.scales.stride(0),
        BLOCK=width,
        ROWS=at_once,
        GATED=gated,
        num_warps=max(4, min(16, width // 1024)),
        **dependent(x.device),
    )
    return found


def rounded_normed_rows(x: Tensor, gain: Tensor, eps: float, *, by_row: bool) -> RoundedRows:
    """Return ``rounded_rows`` of x after RMSNorm with gain [in]."""
    rows, inner = x.shape
    found = _empty(x, inner, by_row)
    blocks = triton.next_power_of_2(triton.cdiv(inner, BLOCK))
    round_normed_rows[(rows,)](
        x,
        gain,
        found.codes,
        found.scales,
        inner,
        x.stride(0),
        found.scales.stride(0),
        eps,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        BY_ROW=by_row,
        num_warps=max(1, min(16, blocks * BLOCK // 512)),
        **dependent(x.device),
    )
    return found


def _empty(x: Tensor, inner: int, by_row: bool) -> RoundedRows:
    padded = triton.cdiv(x.shape[0], ROWS) * ROWS
    codes = torch.empty(padded, inner, dtype=torch.float8_e4m3fn, device=x.device)
    blocks = 1 if by_row else triton.cdiv(inner, BLOCK)
    return RoundedRows(codes, torch.empty(blocks, padded, device=x.device))
