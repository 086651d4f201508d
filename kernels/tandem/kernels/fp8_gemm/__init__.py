"""Products with weights in fp8 (e4m3), with a scale for each block of 128 by 128 or each output.

The weight is read in 8 bits, and sums are in float32. On Hopper x of 16 bits is rounded to e4m3,
with a scale for each row and block of 128 inputs, or for each row if the weight has a scale for
each output, as such checkpoints expect. Elsewhere x keeps its type, and so does float32 x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

BLOCK = 128
"""Outputs, and inputs, that share a scale."""


class FP8Weight(NamedTuple):
    """Weight of one product."""

    codes: Tensor
    """Dense float8_e4m3fn [out, in]."""
    scale: Tensor
    """Dense float32 [blocks of out, blocks of in], the last ones cut short, or [out]."""


def _where(name: str) -> dict[Backend, str]:
    here = "tandem.kernels.fp8_gemm"
    return {Backend.TORCH: f"{here}.reference:{name}", Backend.TRITON: f"{here}.triton:{name}"}


FP8Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
FP8LinearAdd = Callable[[Tensor, Tensor, Tensor, Tensor], None]
FP8NormLinear = Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor | None], Tensor]
FP8FeedForward = Callable[[Tensor, Tensor, float, FP8Weight, FP8Weight, Tensor], None]
FP8_LINEAR: Op[FP8Linear] = Op("fp8_gemm.fp8_linear", _where("fp8_linear"), product=True)
FP8_LINEAR_ADD: Op[FP8LinearAdd] = Op(
    "fp8_gemm.fp8_linear_add", _where("fp8_linear_add"), product=True, writes=3
)
FP8_NORM_LINEAR: Op[FP8NormLinear] = Op(
    "fp8_gemm.fp8_norm_linear", _where("fp8_norm_linear"), product=True
)
FP8_FEED_FORWARD: Op[FP8FeedForward] = Op(
    "fp8_gemm.feed_forward", _where("fp8_feed_forward"), product=True, writes=5
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
    """Return x @ (weight * its scale).T + bias as dense [rows, out].

    x is [rows, in] in float32, bfloat16 or float16; weight dense float8_e4m3fn [out, in]; scale
    dense float32 [blocks of out, blocks of in], the last ones cut short, or [out]; bias [out] of
    x's type. ``out_dtype`` None is x's.
    """
    _check(x, weight, scale, bias)
    return FP8_LINEAR.on(x.device, backend)(x, weight, scale, bias, out_dtype or x.dtype)


def fp8_linear_add(
    x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Add ``fp8_linear`` to residual [rows, out] in place, and return it. Its last dimension is
    dense, and it is of x's type or float32."""
    _check(x, weight, scale, None)
    checks.shape("residual", residual, x.shape[0], weight.shape[0])
    checks.stream("residual", residual, "x", x)
    checks.dense_last("residual", residual)
    FP8_LINEAR_ADD.on(x.device, backend)(x, weight, scale, residual)
    return residual


def fp8_norm_linear(
    x: Tensor,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return fp8_linear(rms_norm(x, gain, eps), ...) in the gain's type; gain [in], and x may be a
    float32 stream."""
    _check(x, weight, scale, bias)
    _check_gain(gain, x)
    return FP8_NORM_LINEAR.on(x.device, backend)(x, gain, eps, weight, scale, bias)


def fp8_feed_forward(
    x: Tensor,
    gain: Tensor,
    eps: float,
    gate_up: FP8Weight,
    down: FP8Weight,
    residual: Tensor,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Add down(silu_and_mul(gate_up(rms_norm(x, gain, eps)))) to residual in place; return it.

    gate_up has the gate's outputs first, twice the inputs of ``down``.
    """
    _check(x, *gate_up, None)
    _check_gain(gain, x)
    checks.shape("gate_up", gate_up.codes, 2 * down.codes.shape[1], None)
    checks.shape("residual", residual, x.shape[0], down.codes.shape[0])
    checks.stream("residual", residual, "gain", gain)
    checks.dense_last("residual", residual)
    FP8_FEED_FORWARD.on(x.device, backend)(x, gain, eps, gate_up, down, residual)
    return residual


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    checks.shape("x", x, None, None)
    checks.kind("x", x, torch.float32, torch.bfloat16, torch.float16)
    checks.shape("weight", weight, None, x.shape[1])
    checks.kind("weight", weight, torch.float8_e4m3fn)
    checks.dense_last("weight", weight)
    if scale.dim() == 1:
        checks.shape("scale", scale, weight.shape[0])
    else:
        checks.shape("scale", scale, *(-(-extent // BLOCK) for extent in weight.shape))
    checks.kind("scale", scale, torch.float32)
    checks.dense_last("scale", scale)
    if bias is not None:
        checks.shape("bias", bias, weight.shape[0])


def _check_gain(gain: Tensor, x: Tensor) -> None:
    checks.shape("gain", gain, x.shape[1])
    checks.stream("x", x, "gain", gain)
