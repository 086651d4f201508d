"""A product's neighbours as ops of their own: what a form of weights has unless it knows better."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from tandem.engine.quant.base import Product
from tandem.kernels.activation import silu_and_mul
from tandem.kernels.norm import rms_norm


class ComposedProduct(ABC):
    """All of Product by the product itself."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""

    def in_float32(self, x: Tensor) -> Tensor:
        """See Product."""
        return self(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See Product."""
        return residual.add_(self(x))

    def of_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """See Product."""
        return self(rms_norm(x, gain, eps))

    def gated_of_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """See Product."""
        return silu_and_mul(self.of_norm(x, gain, eps))

    def part(self, outputs: slice) -> Product | None:
        """See Product; a form is not cut unless it knows how."""
        return None
