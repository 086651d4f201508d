"""RMSNorm in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    if x.dtype != weight.dtype:
        return torch_rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)
    return torch_rms_norm(x, weight.shape, weight, eps)
