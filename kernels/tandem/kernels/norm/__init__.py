"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
AddRmsNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]

RMS_NORM: Op[RmsNorm] = Op(
    "norm.rms_norm",
    {
        Backend.TORCH: "tandem.kernels.norm.reference:rms_norm",
        Backend.TRITON: "tandem.kernels.norm.triton:rms_norm",
    },
)
ADD_RMS_NORM: Op[AddRmsNorm] = Op(
    "norm.add_rms_norm",
    {
        Backend.TORCH: "tandem.kernels.norm.reference:add_rms_norm",
        Backend.TRITON: "tandem.kernels.norm.triton:add_rms_norm",
    },
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: Backend | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich, 2019).

    Args:
        x: [..., dim], the last dimension dense; a stream may be float32 beside narrower weights.
        weight: [dim].
        eps: added to the mean square.
        backend: an explicit choice; by device otherwise.

    Returns:
        x's shape, the weight's dtype; the mean is taken in float32.
    """
    checks.shape("weight", weight, x.shape[-1])
    checks.stream("x", x, "weight", weight)
    checks.dense_last("x", x)
    return RMS_NORM.on(x.device, backend)(x, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: Backend | None = None
) -> Tensor:
    """residual += x in place; returns rms_norm(residual).

    Args:
        x: [tokens, dim], what the last layer added.
        residual: [tokens, dim], the stream, x's dtype or float32; overwritten with the sum.
        weight: [dim].
        eps: added to the mean square.
        backend: an explicit choice; by device otherwise.

    Returns:
        [tokens, dim], the normed sum.
    """
    checks.shape("residual", residual, *x.shape)
    checks.stream("residual", residual, "x", x)
    checks.shape("weight", weight, x.shape[-1])
    checks.same("weight", weight, "x", x)
    checks.dense_last("x", x)
    checks.dense_last("residual", residual)
    return ADD_RMS_NORM.on(x.device, backend)(x, residual, weight, eps)
