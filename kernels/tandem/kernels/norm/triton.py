"""The norms in Triton. Roofline: each row read and written once; at few rows, one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.launch.launcher import Launcher

from .triton_kernels import add_layer_norm_rows, norm_rows

_norm_rows = Launcher(norm_rows)
_add_layer_norm_rows = Launcher(add_layer_norm_rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    if x.dim() == 2:
        return _launch(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows, weight, eps).view(x.shape)


def _launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=weight.dtype, device=x.device)
    width = triton.next_power_of_2(dim)
    if rows:
        _norm_rows(
            (rows,),
            x,
            weight,
            out,
            x.stride(0),
            dim,
            eps,
            WIDTH=width,
            num_warps=_warps(width),
            **dependent(x.device),
        )
    return out


def add_layer_norm(x: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(dim)
    if rows:
        _add_layer_norm_rows(
            (rows,),
            x,
            residual,
            gain,
            shift,
            out,
            x.stride(0),
            residual.stride(0),
            dim,
            eps,
            WIDTH=width,
            num_warps=_warps(width),
            **dependent(x.device),
        )
    return out


def _warps(width: int) -> int:
    return max(1, min(16, width // 512))
