"""Plain weights, multiplied by the ops of tandem.kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.delta import Rows
from tandem.engine.quant.base import (
    ComposedProduct,
    PlainMethod,
    Product,
)
from tandem.kernels.activation import Gate
from tandem.kernels.gemm import (
    linear,
    linear_add,
    norm_gated,
    norm_linear,
)

_TYPES = (torch.float32, torch.bfloat16)
FEWEST_ROWS = 4
"""Rows to which fewer are padded: oneDNN is slower for 1 or 2, as vectors."""


class PackedProduct(ComposedProduct):
    """A weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._blank = weight.new_zeros(FEWEST_ROWS, weight.shape[1])

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        count = x.shape[0]
        if 0 < count < FEWEST_ROWS:
            x = torch.cat((x, self._blank[count:]))
        result: Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return result[:count]


class PackedMethod(PlainMethod):
    """oneDNN's linear over a weight in its own layout; the plain weight can be dropped."""

    name = "packed"

    @staticmethod
    def available(dtype: torch.dtype) -> bool:
        """Return whether this torch and CPU support the method for ``dtype``."""
        if dtype not in _TYPES:
            return False
        try:
            ops = torch.ops.mkldnn
            packed = ops._reorder_linear_weight(torch.ones(16, 16, dtype=dtype))
            got = ops._linear_pointwise(
                torch.ones(1, 16, dtype=dtype), packed, None, "none", [], ""
            )
        except (AttributeError, RuntimeError):
            return False
        return bool((got == 16).all())

    def hold(self, weight: Tensor, bias: Tensor | None) -> Product:
        return PackedProduct(weight, bias)


class DenseProduct(ComposedProduct):
    """A plain weight. With a bias, ops that cannot take one are composed; so are gates but
    SiLU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        return linear(x, self._weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return float32; on a GPU the sums are never rounded."""
        return linear(x, self._weight, self._bias, out_dtype=torch.float32)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        if self._bias is not None:
            return super().add_to(residual, x, rows)
        return linear_add(x, self._weight, residual)

    def of_norm(self, x: Tensor, gain: Tensor, eps: float, rows: Rows | None = None) -> Tensor:
        return norm_linear(x, gain, eps, self._weight, self._bias)

    def gated_of_norm(
        self,
        x: Tensor,
        gain: Tensor,
        eps: float,
        rows: Rows | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        if self._bias is not None or gate is not Gate.SILU:
            return super().gated_of_norm(x, gain, eps, rows, gate)
        return norm_gated(x, gain, eps, self._weight)

    def part(self, outputs: slice) -> Product:
        bias = None if self._bias is None else self._bias[outputs]
        return DenseProduct(self._weight[outputs], bias)


class DenseMethod(PlainMethod):
    """The checkpoint's own tensors."""

    name = "dense"

    def hold(self, weight: Tensor, bias: Tensor | None) -> Product:
        return DenseProduct(weight, bias)
