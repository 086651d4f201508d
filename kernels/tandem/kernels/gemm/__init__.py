"""Products with the weights of linear layers, for any number of rows, and the ops next to them.

At up to 128 rows a kernel of the device's table (tables/, made by scripts/tune_gemm.py) may
replace cuBLAS; otherwise torch multiplies. A backend may fold in the norm before a product and the
residual addition or activation after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

Linear = Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
LinearAdd = Callable[[Tensor, Tensor, Tensor], Tensor]
NormLinear = Callable[[Tensor, Tensor, float, Tensor, Tensor | None], Tensor]
NormGated = Callable[[Tensor, Tensor, float, Tensor], Tensor]


def _where(name: str) -> dict[Backend, str]:
    here = "tandem.kernels.gemm"
    return {Backend.TORCH: f"{here}.reference:{name}", Backend.TRITON: f"{here}.triton:{name}"}


LINEAR: Op[Linear] = Op("gemm.linear", _where("linear"), product=True)
LINEAR_ADD: Op[LinearAdd] = Op("gemm.linear_add", _where("linear_add"), product=True, writes=2)
NORM_LINEAR: Op[NormLinear] = Op("gemm.norm_linear", _where("norm_linear"), product=True)
NORM_GATED: Op[NormGated] = Op("gemm.norm_gated", _where("norm_gated"), product=True)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return x @ weight.T + bias as dense [rows, out], with float32 sums.

    x is [rows, in]; weight [out, in] of x's dtype with a dense last dimension; bias [out].
    ``out_dtype`` None is x's; with another, a GPU does not round the sums to x's dtype.
    """
    _check(x, weight, bias)
    return LINEAR.on(x.device, backend)(x, weight, bias, out_dtype or x.dtype)


def linear_add(
    x: Tensor, weight: Tensor, residual: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Add x @ weight.T to residual [rows, out], of x's dtype or float32, in place; return it."""
    _check(x, weight, None)
    checks.shape("residual", residual, x.shape[0], weight.shape[0])
    checks.stream("residual", residual, "x", x)
    checks.dense_last("residual", residual)
    return LINEAR_ADD.on(x.device, backend)(x, weight, residual)


def norm_linear(
    x: Tensor,
    gain: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Return linear(rms_norm(x, gain, eps), weight, bias); gain [in], x may be a float32 stream."""
    _check_shapes(x, weight, bias)
    _check_gain(gain, x, weight)
    return NORM_LINEAR.on(x.device, backend)(x, gain, eps, weight, bias)


def norm_gated(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Return silu_and_mul(linear(rms_norm(x, gain, eps), weight)) as dense [rows, dim].

    x is [rows, in] and may be a float32 stream; gain [in]; weight [2 * dim, in], the gate's rows
    first.
    """
    _check_shapes(x, weight, None)
    _check_gain(gain, x, weight)
    if weight.shape[0] % 2:
        raise BadTensor(f"weight has {weight.shape[0]} rows, expected an even number")
    return NORM_GATED.on(x.device, backend)(x, gain, eps, weight)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_shapes(x, weight, bias)
    checks.same("weight", weight, "x", x)


def _check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    checks.shape("x", x, None, None)
    checks.shape("weight", weight, None, x.shape[1])
    checks.dense_last("weight", weight)
    if bias is not None:
        checks.shape("bias", bias, weight.shape[0])


def _check_gain(gain: Tensor, x: Tensor, weight: Tensor) -> None:
    checks.shape("gain", gain, x.shape[1])
    checks.same("weight", weight, "gain", gain)
    checks.stream("x", x, "weight", weight)
