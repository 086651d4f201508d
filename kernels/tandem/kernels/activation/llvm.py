"""SiLU gate compiled by LLVM, for float32 in whole vectors; other gates are torch's."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from tandem.kernels.llvm.build import FLOATS, LANES, Kernel, constant, exp
from tandem.kernels.llvm.compiled import Address, agrees, call, compiled

from . import reference

_FIELDS = ("x", "x_stride", "y", "rows", "dim")
_Fields = ctypes.c_int64 * len(_FIELDS)
_WORK = 16
"""Products that take as long as a gate."""


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See the wrapper."""
    whole = gate_up.shape[1] % (2 * LANES) == 0 and gate_up.stride(1) == 1
    if gate_up.dtype != torch.float32 or not (whole and _fits()):
        return reference.silu_and_mul(gate_up)
    return _gated(gate_up)


def _gated(gate_up: Tensor) -> Tensor:
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, dim)
    fields = _Fields(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), rows, dim)
    call(_kernel(), fields, _WORK * rows * dim)
    return y


@cache
def _fits() -> bool:
    def pair() -> tuple[Tensor, Tensor]:
        gate_up = torch.randn(3, 80, generator=torch.Generator().manual_seed(0)).mul_(9)[:, :64]
        return _gated(gate_up), reference.silu_and_mul(gate_up)

    return agrees("activation.silu_and_mul", pair)


@cache
def _kernel() -> Address:
    module = ir.Module("activation")
    k = Kernel(module, "silu_and_mul", _FIELDS)
    b, dim = k.b, k.fields["dim"]
    first, end = k.share(k.fields["rows"])
    with k.loop(end, first=first) as row:
        gate = k.at(k.pointer("x"), b.mul(row, k.fields["x_stride"]))
        up, y = k.at(gate, dim), k.at(k.pointer("y"), b.mul(row, dim))
        with k.loop(dim, step=LANES) as at:
            value = k.floats(gate, at)
            below = b.fadd(exp(b, b.fneg(value)), constant(FLOATS, 1.0))
            k.put(b.fmul(b.fdiv(value, below), k.floats(up, at)), y, at)
    b.ret_void()
    return compiled(module)["silu_and_mul"]
