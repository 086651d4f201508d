"""Gated activations in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu, silu


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See the wrapper."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See the wrapper."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)
