"""Rows of numbers as float8_e4m3fn bytes with one scale per row, and back.

`narrow` chooses the scales: a row's largest magnitude becomes the type's largest number. `encode`
has those of the model (codes.py).
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
Encode = Callable[[Tensor, Tensor, Tensor], None]
ENCODE: Op[Encode] = Op("encode", {Backend.TORCH: f"{_WHERE}:encode"})
DECODE: Op[Encode] = Op("decode", {Backend.TORCH: f"{_WHERE}:decode"})


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


def encode(values: Tensor, scales: Tensor, out: Tensor, *, backend: Backend | None = None) -> None:
    """Write the codes of each block's rows by fixed scales (`codes.to_codes`).

    values are [n, rows, width] float32, bfloat16 or float16; scales float32 [rows]; out is uint8
    [n, rows * width], rows dense, on the same device.
    """
    _check_codes(values, scales, out)
    ENCODE.on(values.device, backend)(values, scales, out)


def decode(codes: Tensor, scales: Tensor, out: Tensor, *, backend: Backend | None = None) -> None:
    """Read the output of ``encode``: code times scale, rounded to the type of ``out``."""
    _check_codes(out, scales, codes)
    DECODE.on(out.device, backend)(codes, scales, out)


def _check_codes(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    _check_values(values)
    count, rows, width = values.shape
    checks.shape("scales", scales, rows)
    checks.kind("scales", scales, torch.float32)
    checks.shape("codes", codes, count, rows * width)
    checks.kind("codes", codes, torch.uint8)
    checks.dense_last("codes", codes)


def _check_values(values: Tensor) -> None:
    checks.shape("values", values, None, None, None)
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise BadTensor(f"values are {values.dtype}, expected float32, bfloat16 or float16")


def _check(values: Tensor, packed: Tensor) -> None:
    _check_values(values)
    count, rows, width = values.shape
    checks.shape("packed", packed, count, rows * (width + SCALE_BYTES))
    checks.kind("packed", packed, torch.uint8)
    aligned = not (rows * width % SCALE_BYTES or packed.storage_offset() % SCALE_BYTES)
    if not aligned or packed.stride(1) != 1 or packed.stride(0) % SCALE_BYTES:
        raise BadTensor(f"rows of {width} numbers and their scales are not aligned to 4 bytes")
