"""RMSNorm alone, which products of kernels.gemm take along where they can; LayerNorm of a sum."""

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

AddLayerNorm = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]

ADD_LAYER_NORM: Op[AddLayerNorm] = Op(
    "norm.add_layer_norm",
    {
        Backend.TORCH: "tandem.kernels.norm.reference:add_layer_norm",
        Backend.TRITON: "tandem.kernels.norm.triton:add_layer_norm",
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


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """(s - mean(s)) / sqrt(variance(s) + eps) * gain + shift of s = x + residual, over the last
    dimension (Ba et al., 2016).

    Args:
        x: [rows, dim], the last dimension dense.
        residual: the same shape and dtype.
        gain: [dim], of x's dtype.
        shift: [dim], of x's dtype.
        eps: added to the variance.
        backend: an explicit choice; by device otherwise.

    Returns:
        [rows, dim], dense, of x's dtype. The sum is float32, and on a GPU written nowhere.
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
