"""RMSNorm, and LayerNorm of a sum."""

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
        Backend.LLVM: "tandem.kernels.norm.llvm:rms_norm",
    },
)

AddLayerNorm = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]

ADD_LAYER_NORM: Op[AddLayerNorm] = Op(
    "norm.add_layer_norm",
    {
        Backend.TORCH: "tandem.kernels.norm.reference:add_layer_norm",
        Backend.TRITON: "tandem.kernels.norm.triton:add_layer_norm",
    },
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: Backend | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich, 2019).

    x is [..., dim] with a dense last dimension; a float32 stream may have narrower weights. The
    result has the weight's dtype; the mean is float32.
    """
    checks.shape("weight", weight, x.shape[-1])
    checks.stream("x", x, "weight", weight)
    checks.dense_last("x", x)
    return RMS_NORM.on(x.device, backend)(x, weight, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return (s - mean(s)) / sqrt(variance(s) + eps) * gain + shift of s = x + residual, over the
    last dimension (Ba et al., 2016).

    x and residual are [rows, dim], the last dimension dense; gain and shift [dim]; all of one
    dtype. The result is dense; the sum is float32.
    """
    checks.shape("x", x, None, None)
    checks.shape("residual", residual, *x.shape)
    checks.same("residual", residual, "x", x)
    for name, tensor in (("gain", gain), ("shift", shift)):
        checks.shape(name, tensor, x.shape[1])
        checks.same(name, tensor, "x", x)
    for name, tensor in (("x", x), ("residual", residual)):
        checks.dense_last(name, tensor)
    return ADD_LAYER_NORM.on(x.device, backend)(x, residual, gain, shift, eps)
