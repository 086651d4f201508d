"""Products compiled by LLVM for this processor, on the threads of torch's own OpenMP.

A form's kernels are compiled at its first use, in a fraction of a second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

from torch import Tensor

from tandem.kernels.llvm.compiled import Address, call, compiled

from . import PackedWeights
from .llvm_kernels import FEW, FIELDS, module_of

_Arguments = ctypes.c_int64 * len(FIELDS)
_FLOAT_BYTES = 4
_NAMES = (
    "many",
    *(f"few_{next(each for each in FEW if rows <= each)}" for rows in range(1, FEW[-1] + 1)),
)
"""Kernel by the number of rows; beyond the last it is ``many``."""


def packed_linear_add(x: Tensor, weights: PackedWeights, y: Tensor) -> None:
    """See the wrapper. Raises NoBackend."""
    rows, inputs = x.shape
    name = _NAMES[rows] if rows < len(_NAMES) else "many"
    values, x_stride, results, y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
    for part, columns in zip(weights.parts, weights.columns, strict=True):
        blocks, kind = part
        outputs = blocks.shape[0]
        arguments = _Arguments(
            *(values, x_stride, blocks.data_ptr(), blocks.stride(0)),
            *(results + _FLOAT_BYTES * columns.start, y_stride, rows, inputs, outputs),
        )
        call(_compiled(kind)[name], arguments, rows * inputs * outputs)


@cache
def _compiled(kind: str) -> Mapping[str, Address]:
    """Return the kernels of a form by name."""
    return compiled(module_of(kind))
