"""RMSNorm in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    return torch_rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    residual.add_(x)
    return torch_rms_norm(residual, weight.shape, weight, eps)
