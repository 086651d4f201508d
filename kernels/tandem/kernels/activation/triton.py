"""Gated activations in Triton. Roofline: both halves read once, the result written once."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.launch.launcher import Launcher

from .triton_kernels import silu_and_mul_rows

_silu_and_mul_rows = Launcher(silu_and_mul_rows)
_BLOCK = 1024
_MOST_ROWS = 65535
"""Maximum rows of a grid's second dimension."""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See the wrapper."""
    return _launch(gate_up, tanh=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See the wrapper."""
    return _launch(gate_up, tanh=True)


def _launch(gate_up: Tensor, *, tanh: bool) -> Tensor:
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    for first in range(0, rows, _MOST_ROWS):
        part = gate_up[first : first + _MOST_ROWS]
        _silu_and_mul_rows(
            (triton.cdiv(dim, _BLOCK), part.shape[0]),
            part,
            out[first:],
            part.stride(0),
            dim,
            BLOCK=_BLOCK,
            GELU_TANH=tanh,
            **dependent(out.device),
        )
    return out
