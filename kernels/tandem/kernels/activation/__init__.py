"""Gated activation of the MLP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

SiluAndMul = Callable[[Tensor], Tensor]

SILU_AND_MUL: Op[SiluAndMul] = Op(
    "activation.silu_and_mul",
    {
        Backend.TORCH: "tandem.kernels.activation.reference:silu_and_mul",
        Backend.TRITON: "tandem.kernels.activation.triton:silu_and_mul",
    },
)


def silu_and_mul(gate_up: Tensor, *, backend: Backend | None = None) -> Tensor:
    """Return silu(gate) * up of [tokens, 2 * dim], the gate first, as dense [tokens, dim]."""
    checks.shape("gate_up", gate_up, None, None)
    if gate_up.shape[1] % 2:
        raise BadTensor(f"gate_up has {gate_up.shape[1]} columns, expected an even number")
    return SILU_AND_MUL.on(gate_up.device, backend)(gate_up)
