"""RMSNorm alone; the products of kernels.gemm take it along where they can."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]

RMS_NORM: Op[RmsNorm] = Op(
    "norm.rms_norm",
    {
        Backend.TORCH: "tandem.kernels.norm.reference:rms_norm",
        Backend.TRITON: "tandem.kernels.norm.triton:rms_norm",
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
