"""Products of int8 weights with a scale per output and x rounded to int8 with a scale per row.

The rounding is part of such checkpoints' arithmetic, so every device does it. Sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

MOST = 127.0
"""Code of the largest number of a row."""
Int8Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
INT8_LINEAR: Op[Int8Linear] = Op(
    "int8_gemm.int8_linear",
    {
        Backend.TORCH: "tandem.kernels.int8_gemm.reference:int8_linear",
        Backend.TRITON: "tandem.kernels.int8_gemm.triton:int8_linear",
    },
    product=True,
)


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return rounded x @ (weight * scale[:, None]).T + bias as dense [rows, out].

    x is [rows, in] in float32, bfloat16 or float16; weight int8 [out, in]; scale float32 [out];
    bias [out] of x's type. A row of x is rounded to the nearest of 255 multiples of its largest
    number over 127, ties to even. ``out_dtype`` None is x's.
    """
    checks.shape("x", x, None, None)
    checks.kind("x", x, torch.float32, torch.bfloat16, torch.float16)
    checks.shape("weight", weight, None, x.shape[1])
    checks.kind("weight", weight, torch.int8)
    checks.dense_last("weight", weight)
    checks.shape("scale", scale, weight.shape[0])
    checks.kind("scale", scale, torch.float32)
    if bias is not None:
        checks.shape("bias", bias, weight.shape[0])
    return INT8_LINEAR.on(x.device, backend)(x, weight, scale, bias, out_dtype or x.dtype)
