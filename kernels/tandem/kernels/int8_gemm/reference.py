"""Product in plain torch. Float32 holds the sums of ``EXACT`` products, so a strip of outputs and a
part of the inputs at a time is converted."""

from __future__ import annotations

import torch
from torch import Tensor

from . import MOST

STRIP = 1024
"""Outputs per pass."""
EXACT = 1024
"""Inputs whose products of two numbers up to 128 have a sum below 2 ** 24, all whole numbers."""


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    codes, of_rows = rounded(x)
    (rows, inner), outputs = codes.shape, weight.shape[0]
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    for first in range(0, outputs, STRIP):
        part = slice(first, min(first + STRIP, outputs))
        sums = torch.zeros(rows, part.stop - first, dtype=torch.int32, device=x.device)
        for at in range(0, inner, EXACT):
            inputs = slice(at, at + EXACT)
            sums += (codes[:, inputs].float() @ weight[part, inputs].float().t()).int()
        found = sums.float() * of_rows[:, None] * scale[part]
        out[:, part] = found if bias is None else found + bias[part].float()
    return out


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as int8 [rows, in] and the float32 scale of each row."""
    values = x.float()
    most = values.abs().amax(1) if x.shape[1] else values.new_zeros(len(x))
    scale = most.clamp_(min=1e-10) / most.new_full((1,), MOST)  # CUDA multiplies by 1 / number
    codes = (values / scale[:, None]).round_().clamp_(-MOST, MOST)
    return codes.to(torch.int8), scale
