"""Numbers as float8_e4m3fn codes: a number is its code times a scale that the model has.

A number is divided by its scale in float32, clamped to the largest code and rounded to nearest
even. A code in bfloat16, float16 or float32 is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor

from . import LARGEST

_LIFT = 2.0**8
"""Factor between a float8's exponent and a float16's."""


def to_codes(values: Tensor, scales: Tensor) -> Tensor:
    """Return the codes of numbers as uint8; float32 ``scales`` are broadcast."""
    scaled = (values.to(torch.float32) / scales).clamp_(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def from_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uint8 codes as numbers of ``dtype``, without their scales.

    A float8 is a float16 with an exponent less by 8: moving bits is faster on a CPU than
    converting.
    """
    bits = codes.to(torch.int16)
    moved = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
    return moved.view(torch.float16).to(dtype).mul_(_LIFT)


def check_pages(kv: Tensor, kv_scales: Tensor | None, name: str, numbers: Tensor) -> None:
    """Check that pages have the type of ``numbers``, or hold codes and have scales.

    kv is [num_blocks, 2, kv_heads, block_size, head_dim], kv_scales float32 [2, kv_heads].
    """
    if kv_scales is None:
        checks.same("kv", kv, name, numbers)
        return
    checks.kind("kv", kv, torch.float8_e4m3fn)
    checks.shape("kv_scales", kv_scales, 2, kv.shape[2])
    checks.kind("kv_scales", kv_scales, torch.float32)
    for each, tensor in (("kv", kv), ("kv_scales", kv_scales)):
        if tensor.device != numbers.device:
            raise BadTensor(f"{each} is on {tensor.device}, but {name} is on {numbers.device}")
    if not kv_scales.is_contiguous():
        raise BadTensor(f"kv_scales has strides {kv_scales.stride()}, expected dense rows")
