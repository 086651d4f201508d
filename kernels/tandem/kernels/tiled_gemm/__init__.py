"""Products with codes of 4 bits in tiles, which Hopper's matrix units take without an exchange.

Values are (code - zero) * scale, rounded to x's type, for any number of rows; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.registry import Backend, Op
from tandem.kernels.tiled_gemm.tiles import BLOCK, TILE, TiledWeight, tiled

TiledLinear = Callable[[Tensor, TiledWeight, Tensor | None, torch.dtype], Tensor]
TiledLinearAdd = Callable[[Tensor, TiledWeight, Tensor], None]


def _where(name: str) -> dict[Backend, str]:
    here = "tandem.kernels.tiled_gemm"
    return {Backend.TORCH: f"{here}.reference:{name}", Backend.TRITON: f"{here}.triton:{name}"}


TILED_LINEAR: Op[TiledLinear] = Op("tiled_gemm.tiled_linear", _where("tiled_linear"), product=True)
TILED_LINEAR_ADD: Op[TiledLinearAdd] = Op(
    "tiled_gemm.tiled_linear_add", _where("tiled_linear_add"), product=True, writes=2
)


def tiled_linear(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return x @ weight.T + bias as dense [rows, out].

    x is [rows, in] in the weight's type; bias [out]. ``out_dtype`` None is x's.
    """
    _check(x, weight)
    if bias is not None:
        checks.shape("bias", bias, weight.outputs)
    return TILED_LINEAR.on(x.device, backend)(x, weight, bias, out_dtype or x.dtype)


def tiled_linear_add(
    x: Tensor, weight: TiledWeight, residual: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Add ``tiled_linear`` to residual [rows, out] in place, and return it. Its last dimension is
    dense, and it is of x's type or float32."""
    _check(x, weight)
    checks.shape("residual", residual, x.shape[0], weight.outputs)
    checks.stream("residual", residual, "x", x)
    checks.dense_last("residual", residual)
    TILED_LINEAR_ADD.on(x.device, backend)(x, weight, residual)
    return residual


def _check(x: Tensor, weight: TiledWeight) -> None:
    checks.shape("x", x, None, weight.inner)
    checks.kind("x", x, weight.dtype)


__all__ = [
    "BLOCK",
    "TILE",
    "TILED_LINEAR",
    "TILED_LINEAR_ADD",
    "TiledWeight",
    "tiled",
    "tiled_linear",
    "tiled_linear_add",
]
