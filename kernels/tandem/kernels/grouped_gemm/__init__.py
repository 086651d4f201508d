"""Products with unsigned codes of 4 or 8 bits that have a scale, and maybe a zero point, per output
and group of inputs: value = (code - zero) * scale.

The weight is read as its codes, and sums are float32. Few rows multiply whole numbers, which x's
type holds exactly, and scale the sums of a group; many rows multiply values rounded to x's type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.grouped_gemm.packing import BLOCK, HALF, packed_width
from tandem.kernels.registry import Backend, Op

GROUPS = (32, 64, 128)
"""Inputs of a group, unless one group has all."""


class GroupedWeight(NamedTuple):
    """Weight [out, in] on one device; see ``packing`` for the codes of 4 bits."""

    codes: Tensor
    """uint8: 4 bits [out, blocks of in * 64]; 8 bits [out, in]."""
    scale: Tensor
    """[in / group, out], the last dimension dense, of x's type or float32."""
    zeros: Tensor | None
    """uint8, as ``scale``; None is half of the codes' range."""
    order: Tensor | None
    """int32 [in]: the input of x at each place of the weight; None is that of x."""
    bits: int

    def part(self, outputs: slice) -> GroupedWeight:
        """Return the weight of some outputs, in the same memory."""
        zeros = None if self.zeros is None else self.zeros[:, outputs]
        return self._replace(codes=self.codes[outputs], scale=self.scale[:, outputs], zeros=zeros)


GroupedLinear = Callable[[Tensor, GroupedWeight, Tensor | None, torch.dtype], Tensor]
GROUPED_LINEAR: Op[GroupedLinear] = Op(
    "grouped_gemm.grouped_linear",
    {
        Backend.TORCH: "tandem.kernels.grouped_gemm.reference:grouped_linear",
        Backend.TRITON: "tandem.kernels.grouped_gemm.triton:grouped_linear",
    },
    product=True,
)
GroupedLinearAdd = Callable[[Tensor, GroupedWeight, Tensor], None]
GROUPED_LINEAR_ADD: Op[GroupedLinearAdd] = Op(
    "grouped_gemm.grouped_linear_add",
    {
        Backend.TORCH: "tandem.kernels.grouped_gemm.reference:grouped_linear_add",
        Backend.TRITON: "tandem.kernels.grouped_gemm.triton:grouped_linear_add",
    },
    product=True,
    writes=2,
)


def grouped_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Return x @ weight.T + bias as dense [rows, out].

    x is [rows, in] in float32, bfloat16 or float16; bias [out] of x's type. ``out_dtype`` None is
    x's.
    """
    _check(x, weight)
    if bias is not None:
        checks.shape("bias", bias, weight.codes.shape[0])
    x = _ordered(x, weight)
    return GROUPED_LINEAR.on(x.device, backend)(x, weight, bias, out_dtype or x.dtype)


def grouped_linear_add(
    x: Tensor, weight: GroupedWeight, residual: Tensor, *, backend: Backend | None = None
) -> Tensor:
    """Add ``grouped_linear`` to residual [rows, out] in place, and return it. Its last dimension is
    dense, and it is of x's type or float32."""
    _check(x, weight)
    checks.shape("residual", residual, x.shape[0], weight.codes.shape[0])
    checks.stream("residual", residual, "x", x)
    checks.dense_last("residual", residual)
    GROUPED_LINEAR_ADD.on(x.device, backend)(_ordered(x, weight), weight, residual)
    return residual


def _ordered(x: Tensor, weight: GroupedWeight) -> Tensor:
    return x if weight.order is None else x.index_select(1, weight.order)


def _check(x: Tensor, weight: GroupedWeight) -> None:
    checks.shape("x", x, None, None)
    checks.kind("x", x, torch.float32, torch.bfloat16, torch.float16)
    inner, outputs = x.shape[1], weight.codes.shape[0]
    checks.shape("codes", weight.codes, None, packed_width(inner, weight.bits))
    checks.kind("codes", weight.codes, torch.uint8)
    checks.shape("scale", weight.scale, None, outputs)
    checks.kind("scale", weight.scale, torch.float32, x.dtype)
    groups = weight.scale.shape[0]
    if groups < 1 or (groups > 1 and (inner % groups or inner // groups not in GROUPS)):
        raise BadTensor(f"scale has {groups} groups of {inner} inputs, expected one or {GROUPS}")
    if weight.zeros is not None:
        checks.shape("zeros", weight.zeros, groups, outputs)
        checks.kind("zeros", weight.zeros, torch.uint8)
    for name in ("codes", "scale", "zeros"):
        tensor = getattr(weight, name)
        if tensor is not None:
            checks.dense_last(name, tensor)


__all__ = [
    "BLOCK",
    "GROUPED_LINEAR",
    "GROUPED_LINEAR_ADD",
    "GROUPS",
    "HALF",
    "GroupedWeight",
    "grouped_linear",
    "grouped_linear_add",
]
