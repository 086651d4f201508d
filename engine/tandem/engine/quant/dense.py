"""Weights as the checkpoint has them, multiplied by the ops of tandem.kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.quant.base import ComposedProduct, PlainMethod, Product, Rows
from tandem.kernels.gemm import linear, linear_add, norm_gated, norm_linear


class DenseProduct(ComposedProduct):
    """A plain weight. An op that folds a neighbour in only without a bias is composed with one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """See Product."""
        return linear(x, self._weight, self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        """See Product; on a GPU the sums are never rounded."""
        return linear(x, self._weight, self._bias, out_dtype=torch.float32)

    def add_to(self, residual: Tensor, x: Tensor, rows: Rows | None = None) -> Tensor:
        """See Product."""
        if self._bias is not None:
            return super().add_to(residual, x, rows)
        return linear_add(x, self._weight, residual)

    def of_norm(self, x: Tensor, gain: Tensor, eps: float, rows: Rows | None = None) -> Tensor:
        """See Product."""
        return norm_linear(x, gain, eps, self._weight, self._bias)

    def gated_of_norm(
        self, x: Tensor, gain: Tensor, eps: float, rows: Rows | None = None
    ) -> Tensor:
        """See Product."""
        if self._bias is not None:
            return super().gated_of_norm(x, gain, eps, rows)
        return norm_gated(x, gain, eps, self._weight)

    def part(self, outputs: slice) -> Product:
        """See Product."""
        bias = None if self._bias is None else self._bias[outputs]
        return DenseProduct(self._weight[outputs], bias)


class DenseMethod(PlainMethod):
    """The checkpoint's own tensors."""

    name = "dense"

    def hold(self, weight: Tensor, bias: Tensor | None) -> Product:
        """See PlainMethod."""
        return DenseProduct(weight, bias)
