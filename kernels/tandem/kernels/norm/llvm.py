"""RMSNorm compiled by LLVM, for float32 in whole vectors; other norms are torch's."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from tandem.kernels.llvm.build import LANES, Kernel, inverse_rms
from tandem.kernels.llvm.compiled import Address, agrees, bits_of, call, compiled

from . import reference

_FIELDS = ("x", "x_stride", "weight", "y", "rows", "dim", "eps", "part")
_Fields = ctypes.c_int64 * len(_FIELDS)
_WORK = 8
"""Products that take as long as a number of a norm."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the wrapper."""
    floats = x.dtype == weight.dtype == torch.float32
    if x.ndim != 2 or x.shape[1] % LANES or not (floats and weight.is_contiguous() and _fits()):
        return reference.rms_norm(x, weight, eps)
    return _normed(x, weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, dim = x.shape
    y = torch.empty(rows, dim)
    fields = _Fields(
        *(x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(), rows, dim),
        *(bits_of(eps), bits_of(1 / dim)),
    )
    call(_kernel(), fields, _WORK * rows * dim)
    return y


@cache
def _fits() -> bool:
    def pair() -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        x, weight = torch.randn(3, 80, generator=draw)[:, :64], torch.randn(64, generator=draw)
        return _normed(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)

    return agrees("norm.rms_norm", pair)


@cache
def _kernel() -> Address:
    module = ir.Module("norm")
    k = Kernel(module, "rms_norm", _FIELDS)
    b, dim = k.b, k.fields["dim"]
    first, end = k.share(k.fields["rows"])
    weight = k.pointer("weight")
    with k.loop(end, first=first) as row:
        x = k.at(k.pointer("x"), b.mul(row, k.fields["x_stride"]))
        y = k.at(k.pointer("y"), b.mul(row, dim))
        factor = inverse_rms(k, x, dim)
        with k.loop(dim, step=LANES) as at:
            k.put(b.fmul(b.fmul(k.floats(x, at), factor), k.floats(weight, at)), y, at)
    b.ret_void()
    return compiled(module)["rms_norm"]
