"""The norms in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import layer_norm
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    if x.dtype != weight.dtype:
        return torch_rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)
    return torch_rms_norm(x, weight.shape, weight, eps)


def add_layer_norm(x: Tensor, residual: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    value, more, scale, offset = (each.float() for each in (x, residual, gain, shift))
    return layer_norm(value + more, scale.shape, scale, offset, eps).to(x.dtype)
