"""RMSNorm with its weight."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.norm import add_rms_norm, rms_norm


class RMSNorm:
    """Norm of the last dimension, alone or with the residual addition before it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The normed x."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to ``residual`` in place; the normed sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)
