"""RMSNorm with its weight."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.norm import rms_norm


class RMSNorm:
    """Norm of the last dimension. Linear layers that follow one take it along."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The normed x."""
        return rms_norm(x, self.weight, self.eps)
