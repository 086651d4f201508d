"""Rows of numbers as float8_e4m3fn bytes with one scale per row, and back.

A row's largest magnitude becomes the type's largest number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

SCALE_BYTES = 4
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
_WHERE = "tandem.kernels.narrow.reference"
NARROW: Op[Callable[[Tensor, Tensor], None]] = Op("narrow", {Backend.TORCH: f"{_WHERE}:narrow"})
WIDEN: Op[Callable[[Tensor, Tensor], None]] = Op("widen", {Backend.TORCH: f"{_WHERE}:widen"})


def narrow(values: Tensor, out: Tensor, *, backend: Backend | None = None) -> None:
    """Write each block's rows as bytes, then their scales.

    values are [n, rows, width] float32, bfloat16 or float16; rows * width is a multiple of 4. out
    is uint8 [n, rows * width + 4 * rows], rows dense, on the same device, aligned to 4 bytes.
    """
    _check(values, out)
    NARROW.on(values.device, backend)(values, out)


def widen(packed: Tensor, out: Tensor, *, backend: Backend | None = None) -> None:
    """Read the output of ``narrow``: ``packed`` as its ``out``, ``out`` as its ``values``."""
    _check(out, packed)
    WIDEN.on(out.device, backend)(packed, out)


def _check(values: Tensor, packed: Tensor) -> None:
    checks.shape("values", values, None, None, None)
    count, rows, width = values.shape
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise BadTensor(f"values are {values.dtype}, expected float32, bfloat16 or float16")
    checks.shape("packed", packed, count, rows * (width + SCALE_BYTES))
    checks.kind("packed", packed, torch.uint8)
    aligned = not (rows * width % SCALE_BYTES or packed.storage_offset() % SCALE_BYTES)
    if not aligned or packed.stride(1) != 1 or packed.stride(0) % SCALE_BYTES:
        raise BadTensor(f"rows of {width} numbers and their scales are not aligned to 4 bytes")
