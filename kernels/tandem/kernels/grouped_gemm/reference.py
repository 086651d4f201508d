"""Product in plain torch, a strip of outputs at a time, which bounds the memory of decoded
weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import GroupedWeight
from .packing import unpack

STRIP = 1024
"""Outputs per pass: their weights are decoded to x's type."""


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper; weights are rounded to x's type."""
    outputs = weight.codes.shape[0]
    out = torch.empty(x.shape[0], outputs, dtype=out_dtype, device=x.device)
    for first in range(0, outputs, STRIP):
        part = slice(first, min(first + STRIP, outputs))
        strip = decoded(weight.part(part), x.shape[1]).to(x.dtype)
        out[:, part] = linear(x, strip, None if bias is None else bias[part])
    return out


def grouped_linear_add(x: Tensor, weight: GroupedWeight, residual: Tensor) -> None:
    """See the wrapper."""
    residual.add_(grouped_linear(x, weight, None, residual.dtype))


def decoded(weight: GroupedWeight, inner: int) -> Tensor:
    """Return the values in float32 [out, inner], in the weight's order of inputs."""
    codes = weight.codes if weight.bits == 8 else unpack(weight.codes, inner)
    groups, outputs = weight.scale.shape
    values = codes.float().view(outputs, groups, -1)
    half = float(1 << (weight.bits - 1))
    zeros = half if weight.zeros is None else weight.zeros.t()[:, :, None].float()
    return values.sub_(zeros).mul_(weight.scale.t()[:, :, None].float()).flatten(1)
