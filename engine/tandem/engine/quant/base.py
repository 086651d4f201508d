"""The seam of linear layers: a method takes a checkpoint's weight and gives back a product.

Dense weights, weights packed for a CPU, and later fp8 or int4 differ here and nowhere else; the
layers above hold a ``Product`` and know nothing of the form. A product also takes its neighbours,
so that a form whose kernels fold them in can do so: the norm before it, the residual stream or the
gated activation after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.norm import rms_norm


class Product(Protocol):
    """x @ weight.T + bias, with what surrounds it."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] to [tokens, out]."""
        ...

    def in_float32(self, x: Tensor) -> Tensor:
        """The product as float32, not rounded to the type of x where the form can do without."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [tokens, out] += the product, in place; returns it."""
        ...

    def of_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """The product of x after RMSNorm with ``gain`` [in]."""
        ...

    def gated_of_norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """silu(first half) * second half of ``of_norm``: [tokens, out / 2]."""
        ...

    def part(self, outputs: slice) -> Product | None:
        """The product that gives these outputs alone, in the same memory; None where the form
        cannot be cut."""
        ...


class LinearMethod(Protocol):
    """One form of weights."""

    name: str

    def load(self, weight: Tensor, bias: Tensor | None) -> Product:
        """The product with ``weight`` [out, in] plus ``bias`` [out]. May keep or repack them."""
        ...


class ComposedProduct(ABC):
    """All of Product by the product itself, its neighbours as ops of their own: what a form of
    weights has unless it knows better."""

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
