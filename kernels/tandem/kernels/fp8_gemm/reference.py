"""Product in plain torch, a strip of outputs at a time, which bounds the memory of converted
weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from . import BLOCK

STRIP = 8 * BLOCK
"""Outputs per pass: their weights are converted to x's type."""


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper; scaled weights are rounded to x's type."""
    outputs = weight.shape[0]
    out = torch.empty(x.shape[0], outputs, dtype=out_dtype, device=x.device)
    for first in range(0, outputs, STRIP):
        part = slice(first, min(first + STRIP, outputs))
        scales = scale[first // BLOCK : -(-part.stop // BLOCK)]
        strip = scaled(weight[part], scales).to(x.dtype)
        out[:, part] = linear(x, strip, None if bias is None else bias[part])
    return out


def fp8_linear_add(x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor) -> None:
    """See the wrapper."""
    residual.add_(fp8_linear(x, weight, scale, None, residual.dtype))


def rounded(x: Tensor) -> Tensor:
    """Return x in float32, rounded to e4m3 with a scale for each row and block of inputs."""
    rows, inner = x.shape
    blocks = pad(x.float(), (0, -inner % BLOCK)).view(rows, -(-inner // BLOCK), BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    found: Tensor = (blocks / scales).to(torch.float8_e4m3fn).float() * scales
    return found.flatten(1)[:, :inner]


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the weights in float32; the first row must begin a block."""
    outputs, inner = weight.shape
    rows = scale.repeat_interleave(BLOCK, 0)[:outputs]
    return weight.float().mul_(rows.repeat_interleave(BLOCK, 1)[:, :inner])
