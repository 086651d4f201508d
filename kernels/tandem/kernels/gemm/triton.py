"""Products in Triton if the device's table has a form for them, else torch's.

Roofline: bytes of the weight over the memory's read rate; see bench/results/gemm_h200.md.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.launch import dependent
from tandem.kernels.norm import rms_norm

from . import cublaslt, reference
from .form import Form, Kind
from .table import algorithm_for, form_for
from .triton_kernels import multiply_few, multiply_one

PARTIAL_BYTES = 32 << 20
"""Bytes of the partial sums of split products."""
_COUNTERS = 1 << 14
MOST_ROWS = 64
"""Maximum rows of the plain kernels; forms for Hopper take more."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See the wrapper."""
    form = _form(x, weight)
    if form is not None:
        return launch(x, weight, form, bias=bias, out_dtype=out_dtype)
    if bias is None and out_dtype == x.dtype:
        outputs, inner = weight.shape
        algorithm = algorithm_for(x.device, outputs, inner, x.shape[0])
        product = None if algorithm is None else cublaslt.multiply(x, weight, algorithm)
        if product is not None:
            return product
    return reference.linear(x, weight, bias, out_dtype)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """See the wrapper."""
    form = _form(x, weight)
    if form is None:
        return reference.linear_add(x, weight, residual)
    return launch(x, weight, form, residual=residual)


def norm_linear(x: Tensor, gain: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See the wrapper."""
    return linear(rms_norm(x, gain, eps), weight, bias, weight.dtype)


def norm_gated(x: Tensor, gain: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See the wrapper; the activation is folded in if the table's form has it."""
    normed = rms_norm(x, gain, eps)
    form = _form(normed, weight, Kind.GATED)
    if form is None:
        return silu_and_mul(linear(normed, weight, None, weight.dtype))
    return launch(normed, weight, form, gated=True)


def launch(
    x: Tensor,
    weight: Tensor,
    form: Form,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Launch one product of at least one row in a given form; gated from two rows on."""
    rows, outputs = x.shape[0], weight.shape[0] // (2 if gated else 1)
    out = residual
    if out is None:
        out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if form.stream:
        from . import gluon  # requires Triton's Gluon

        gluon.launch(x, weight, form, out, bias, residual, room(x.device), gated=gated)
    elif rows == 1:
        assert not gated, "the activation is not folded into a product of one row"
        _launch_one(x, weight, form, out, bias, residual)
    else:
        _launch_few(x, weight, form, out, bias, residual, gated)
    return out


def _launch_one(
    x: Tensor, weight: Tensor, form: Form, out: Tensor, bias: Tensor | None, residual: Tensor | None
) -> None:
    multiply_one[(out.shape[1] // form.outputs,)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        weight.stride(0),
        BN=form.outputs,
        BK=form.inner,
        CHUNKS=weight.shape[1] // form.inner,
        ADD=residual is not None,
        BIAS=bias is not None,
        num_warps=form.warps,
        **dependent(x.device),
    )


def _launch_few(
    x: Tensor,
    weight: Tensor,
    form: Form,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> None:
    rows, outputs = x.shape[0], out.shape[1]
    per_program = form.outputs // (2 if gated else 1)
    partials, counters = room(x.device) if form.split > 1 else (x, x)
    multiply_few[(outputs // per_program, form.split)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partials,
        counters,
        rows,
        outputs,
        outputs,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        weight.shape[1],
        BM=max(16, triton.next_power_of_2(rows)),
        BN=per_program,
        BK=form.inner,
        SPLIT=form.split,
        STAGES=form.stages,
        LINES=triton.next_power_of_2(-(-form.inner * 2 // 128) * max(1, form.stages - 1)),
        GATED=gated,
        ADD=residual is not None,
        BIAS=bias is not None,
        num_warps=form.warps,
        **dependent(x.device),
    )


def fits(form: Form, kind: Kind, outputs: int, inner: int, rows: int) -> bool:
    """Return whether a form divides a shape, its parts have room, and it can fold the kind in."""
    if form.stream:
        from . import gluon

        whole = inner % (form.inner * form.split) == 0
        whole = whole and outputs % (form.outputs * form.group) == 0
        room = form.split == 1 or form.split * gluon.narrow(rows) * outputs * 4 <= PARTIAL_BYTES
        return whole and room and gluon.ring_fits(form, rows)
    if kind is Kind.GATED and (rows == 1 or form.split > 1 or form.outputs < 32):
        return False
    if rows > MOST_ROWS:
        return False
    if outputs % form.outputs or inner % (form.inner * form.split):
        return False
    if form.split == 1:
        return True
    room = form.split * rows * outputs * 4 <= PARTIAL_BYTES
    return rows > 1 and room and outputs // form.outputs <= _COUNTERS


def _form(x: Tensor, weight: Tensor, kind: Kind = Kind.PLAIN) -> Form | None:
    rows = x.shape[0]
    if x.is_cuda:
        room(x.device)  # by a step's first product, before any graph is captured
    if not rows or x.dtype not in (torch.bfloat16, torch.float16) or x.stride(1) != 1:
        return None
    outputs, inner = weight.shape
    form = form_for(x.device, kind, outputs, inner, rows)
    if form is None or not fits(form, kind, outputs, inner, rows):
        return None
    return form if not form.stream or _streams(x, weight) else None


def _streams(x: Tensor, weight: Tensor) -> bool:
    from . import gluon

    return gluon.takes(x, weight)


@cache
def room(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the partial sums and counters of a device, shared by products of one stream."""
    return (
        torch.empty(PARTIAL_BYTES // 4, dtype=torch.float32, device=device),
        torch.zeros(_COUNTERS, dtype=torch.int32, device=device),
    )
