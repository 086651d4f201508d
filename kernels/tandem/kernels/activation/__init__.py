"""Gated activation of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

Gated = Callable[[Tensor], Tensor]


class Gate(StrEnum):
    """Activation of the gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its approximation with tanh (Hendrycks & Gimpel, 2016)."""


SILU_AND_MUL: Op[Gated] = Op(
    "activation.silu_and_mul",
    {
        Backend.TORCH: "tandem.kernels.activation.reference:silu_and_mul",
        Backend.TRITON: "tandem.kernels.activation.triton:silu_and_mul",
        Backend.LLVM: "tandem.kernels.activation.llvm:silu_and_mul",
    },
)
GELU_TANH_AND_MUL: Op[Gated] = Op(
    "activation.gelu_tanh_and_mul",
    {
        Backend.TORCH: "tandem.kernels.activation.reference:gelu_tanh_and_mul",
        Backend.TRITON: "tandem.kernels.activation.triton:gelu_tanh_and_mul",
    },
)


def silu_and_mul(gate_up: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Return silu(gate) * up of [tokens, 2 * dim], the gate first, as dense [tokens, dim]."""
    _check(gate_up)
    return SILU_AND_MUL.on(gate_up.device, backend)(gate_up)


def gelu_tanh_and_mul(gate_up: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Return gelu(gate) * up as ``silu_and_mul`` does."""
    _check(gate_up)
    return GELU_TANH_AND_MUL.on(gate_up.device, backend)(gate_up)


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """Return activation(gate) * up by the op of ``gate``."""
    return silu_and_mul(gate_up) if gate is Gate.SILU else gelu_tanh_and_mul(gate_up)


def _check(gate_up: Tensor) -> None:
    checks.shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        raise BadTensor(f"gate_up has {gate_up.shape[1]} columns, expected an even number")
