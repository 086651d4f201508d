"""The seam of linear layers: a method takes a checkpoint's weight and gives back a product.

Dense weights, weights packed for a CPU, and later fp8 or int4 differ here and nowhere else; the
layers above hold a ``Multiply`` and know nothing of the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Multiply = Callable[[Tensor], Tensor]
"""[tokens, in] to [tokens, out]."""


class LinearMethod(Protocol):
    """One form of weights."""

    name: str

    def load(self, weight: Tensor, bias: Tensor | None) -> Multiply:
        """The product with ``weight`` [out, in] plus ``bias`` [out]. May keep or repack them."""
        ...
