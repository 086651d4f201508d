"""Products with weights in fp8 (e4m3) that have a scale for each block of 128 by 128.

The weight is read in 8 bits, and sums are in float32. On Hopper x of 16 bits is rounded to e4m3,
with a scale for each row and block of 128 inputs, as such checkpoints expect. Elsewhere x keeps its
type, and so does float32 x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

BLOCK = 128
"""Outputs, and inputs, that share a scale."""

FP8Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
FP8_LINEAR: Op[FP8Linear] = Op(
    "fp8_gemm.fp8_linear",
    {
        Backend.TORCH: "tandem.kernels.fp8_gemm.reference:fp8_linear",
        Backend.TRITON: "tandem.kernels.fp8_gemm.triton:fp8_linear",
    },
)
FP8LinearAdd = Callable[[Tensor, Tensor, Tensor, Tensor], None]
FP8_LINEAR_ADD: Op[FP8LinearAdd] = Op(
    "fp8_gemm.fp8_linear_add",
    {
        Backend.TORCH: "tandem.kernels.fp8_gemm.reference:fp8_linear_add",
        Backend.TRITON: "tandem.kernels.fp8_gemm.triton:fp8_linear_add",
    },
)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return x @ (weight * scale of its block).T + bias as dense [rows, out].

    x is [rows, in] in float32, bfloat16 or float16; weight dense float8_e4m3fn [out, in]; scale
    dense float32 [blocks of out, blocks of in], the last ones cut short; bias [out] of x's type.
    ``out_dtype`` None is x's.
    """
    _check(x, weight, scale)
    if bias is not None:
        checks.shape("bias", bias, weight.shape[0])
    return FP8_LINEAR.on(x.device, backend)(x, weight, scale, bias, out_dtype or x.dtype)


def fp8_linear_add(
    x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Add ``fp8_linear`` to residual [rows, out] in place, and return it. Its last dimension is
    dense, and it is of x's type or float32."""
    _check(x, weight, scale)
    checks.shape("residual", residual, x.shape[0], weight.shape[0])
    checks.stream("residual", residual, "x", x)
    checks.dense_last("residual", residual)
    FP8_LINEAR_ADD.on(x.device, backend)(x, weight, scale, residual)
    return residual


def _check(x: Tensor, weight: Tensor, scale: Tensor) -> None:
    checks.shape("x", x, None, None)
    checks.kind("x", x, torch.float32, torch.bfloat16, torch.float16)
    checks.shape("weight", weight, None, x.shape[1])
    checks.kind("weight", weight, torch.float8_e4m3fn)
    checks.dense_last("weight", weight)
    checks.shape("scale", scale, *(-(-extent // BLOCK) for extent in weight.shape))
    checks.kind("scale", scale, torch.float32)
    checks.dense_last("scale", scale)
