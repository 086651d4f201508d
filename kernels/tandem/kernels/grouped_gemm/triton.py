"""Product in Triton; from some hundred rows the decoded weight in cuBLAS.

Roofline: at few rows, the bytes of the codes and scales over the memory's read rate; at many,
operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tandem.kernels.gemm import linear
from tandem.kernels.launch import dependent

from . import GroupedWeight
from .packing import BLOCK
from .triton_kernels import add_parts, decode, multiply_codes

MANY_ROWS = 128
"""Rows from which the weight is decoded once and multiplied by cuBLAS."""
_TALL = 64
"""Rows of a tile at most."""
_WIDTH = 64
"""Outputs of a tile."""
_PROGRAMS = 512
"""Programs of a product at most, unless it has more tiles; measured on an H200."""
_MOST_PARTS = 8
_ADDED = 1024
"""Outputs of a program that adds parts."""


class Form(NamedTuple):
    """Tuning of ``multiply_codes``."""

    height: int
    """Rows of a tile: 16, 32 or 64."""
    width: int
    """Outputs of a tile: 64 or 128."""
    parts: int
    """Parts of the inputs, a power of two, whose sums are added by another kernel if several."""
    stages: int
    warps: int


def form_of(rows: int, outputs: int, inner: int) -> Form:
    """Return the form of a product by its shape. More rows than a tile has change nothing, so that
    no step builds another kernel."""
    height = max(16, min(_TALL, triton.next_power_of_2(rows)))
    tiles, parts = triton.cdiv(outputs, _WIDTH), 1
    while parts < _MOST_PARTS and 2 * parts * tiles <= _PROGRAMS and parts * BLOCK < inner:
        parts *= 2
    return Form(height, _WIDTH, parts, stages=3, warps=4)


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See the wrapper."""
    rows, outputs = x.shape[0], weight.codes.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    if rows >= MANY_ROWS:
        return linear(x, decoded(weight, x.shape[1], x.dtype), bias, out_dtype=out_dtype)
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    if rows:
        multiply(x, weight, bias, None, out)
    return out


def grouped_linear_add(x: Tensor, weight: GroupedWeight, residual: Tensor) -> None:
    """See the wrapper."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.shape[0] >= MANY_ROWS:
        residual.add_(grouped_linear(x, weight, None, residual.dtype))
    elif x.shape[0]:
        multiply(x, weight, None, residual, residual)


def decoded(weight: GroupedWeight, inner: int, dtype: torch.dtype) -> Tensor:
    """Return the values [out, in], rounded to ``dtype``, in the weight's order of inputs."""
    outputs, width = weight.codes.shape[0], 32
    out = torch.empty(outputs, inner, dtype=dtype, device=weight.codes.device)
    zeros = weight.codes if weight.zeros is None else weight.zeros
    decode[(triton.cdiv(outputs, width), triton.cdiv(inner, BLOCK))](
        weight.codes,
        weight.scale,
        zeros,
        out,
        outputs,
        inner,
        weight.codes.stride(0),
        weight.scale.stride(0),
        zeros.stride(0),
        BN=width,
        GROUP=_group(weight, inner),
        BITS=weight.bits,
        BLOCK=BLOCK,
        ZEROS=weight.zeros is not None,
        **dependent(out.device),
    )
    return out


def multiply(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    form: Form | None = None,
) -> None:
    """Write x @ weight.T + bias (+ residual) to out, which may be the residual. ``form`` None is
    ``form_of`` the shape."""
    (rows, inner), outputs = x.shape, weight.codes.shape[0]
    form = form or form_of(rows, outputs, inner)
    wide, tall = triton.cdiv(outputs, form.width), triton.cdiv(rows, form.height)
    height = tall * form.height
    sums = out
    if form.parts > 1:
        sums = torch.empty(form.parts, height, outputs, device=x.device)
    zeros = weight.codes if weight.zeros is None else weight.zeros
    multiply_codes[(wide, form.parts, tall)](
        x,
        weight.codes,
        weight.scale,
        zeros,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        sums,
        rows,
        outputs,
        inner,
        x.stride(0),
        weight.codes.stride(0),
        weight.scale.stride(0),
        zeros.stride(0),
        0 if residual is None else residual.stride(0),
        height,
        BM=form.height,
        BN=form.width,
        GROUP=_group(weight, inner),
        BITS=weight.bits,
        BLOCK=BLOCK,
        PARTS=form.parts,
        ZEROS=weight.zeros is not None,
        BIAS=bias is not None,
        ADDS=residual is not None,
        FAST=x.dtype is not torch.float32,
        STAGES=form.stages,
        num_warps=form.warps,
        **dependent(x.device),
    )
    if form.parts > 1:
        add_parts[(rows, triton.cdiv(outputs, _ADDED))](
            sums,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            outputs,
            0 if residual is None else residual.stride(0),
            height,
            PARTS=form.parts,
            BN=_ADDED,
            BIAS=bias is not None,
            ADDS=residual is not None,
            **dependent(x.device),
        )


def _group(weight: GroupedWeight, inner: int) -> int:
    """Return the inputs of a group; 0 if one group has all."""
    groups = weight.scale.shape[0]
    return inner // groups if groups > 1 else 0
