"""The seam of linear layers: a method takes a checkpoint's weight and gives back a product.

Dense weights, weights packed for a CPU, and later fp8 or int4 differ here and nowhere else; the
layers above hold a ``Product`` and know nothing of the form. A product also takes its neighbours,
so that a form whose kernels fold them in can do so: the norm before it, the residual stream or the
gated activation after it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
