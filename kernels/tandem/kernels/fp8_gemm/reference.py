"""Product in plain torch, a strip of outputs at a time, which bounds the memory of converted
weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.norm import rms_norm

from . import BLOCK, FP8Weight

STRIP = 8 * BLOCK
"""Outputs per pass: their weights are converted to x's type."""
LARGEST = 448.0
"""Largest number of e4m3."""


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper; scaled weights are rounded to x's type."""
    outputs = weight.shape[0]
    out = torch.empty(x.shape[0], outputs, dtype=out_dtype, device=x.device)
    for first in range(0, outputs, STRIP):
        part = slice(first, min(first + STRIP, outputs))
        scales = scale[part if scale.dim() == 1 else slice(first // BLOCK, -(-part.stop // BLOCK))]
        strip = scaled(weight[part], scales).to(x.dtype)
        out[:, part] = linear(x, strip, None if bias is None else bias[part])
    return out


def fp8_linear_add(x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor) -> None:
    """See the wrapper."""
    residual.add_(fp8_linear(x, weight, scale, None, residual.dtype))


def fp8_norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """See the wrapper."""
    return fp8_linear(rms_norm(x, gain, eps), weight, scale, bias, gain.dtype)


def fp8_feed_forward(
    x: Tensor, gain: Tensor, eps: float, gate_up: FP8Weight, down: FP8Weight, residual: Tensor
) -> None:
    """See the wrapper."""
    inner = silu_and_mul(fp8_norm_linear(x, gain, eps, *gate_up, None))
    fp8_linear_add(inner, *down, residual)


def rounded(x: Tensor, *, by_row: bool = False) -> Tensor:
    """Return x in float32, rounded to e4m3 with a scale for each row and block of inputs, or for
    each row."""
    rows, inner = x.shape
    size = inner if by_row else BLOCK
    blocks = pad(x.float(), (0, -inner % size)).view(rows, -(-inner // size), size)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    found: Tensor = (blocks / scales).to(torch.float8_e4m3fn).float() * scales
    return found.flatten(1)[:, :inner]


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the weights in float32; the first row must begin a block."""
    if scale.dim() == 1:
        return weight.float().mul_(scale[:, None])
    outputs, inner = weight.shape
    rows = scale.repeat_interleave(BLOCK, 0)[:outputs]
    return weight.float().mul_(rows.repeat_interleave(BLOCK, 1)[:, :inner])
