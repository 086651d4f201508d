"""Decoding in plain torch, and the product a strip of outputs at a time.

The layouts are those of ggml-common.h; values equal those of ``gguf.dequantize``, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import FORMS, PackedWeights

STRIP = 1024
"""Outputs per pass, whose decoded weights are in memory."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def packed_linear_add(x: Tensor, weights: PackedWeights, y: Tensor) -> None:
    """See the wrapper."""
    for part, columns in zip(weights.parts, weights.columns, strict=True):
        for first in range(0, len(part.blocks), STRIP):
            strip = linear(x, decoded(part.blocks[first : first + STRIP], part.kind))
            at = columns.start + first
            y[:, at : at + strip.shape[1]] += strip


def decoded(blocks: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights [out, in] of blocks uint8 [out, bytes of a row]."""
    outputs = blocks.shape[0]
    if kind in _FLOATS:
        return blocks.contiguous().view(_FLOATS[kind]).to(dtype)
    each = blocks.reshape(-1, FORMS[kind].size)
    return _DECODE[kind](each).view(outputs, -1).to(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return a float16 of each block as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """Return [blocks, 2 n]: the low halves of n bytes, then the high ones."""
    return torch.cat((codes & 15, codes >> 4), 1)


def _fifths(codes: Tensor) -> Tensor:
    """Return bit i of 4 bytes as 16 or 0, [blocks, 32]."""
    bits = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return ((codes[:, :, None] >> bits & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifths(blocks[:, 2:6])
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifths(blocks[:, 4:8])
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the minimum of each 32 values of a Q4_K or Q5_K block,
    [blocks, 8, 1]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, third & 15 | first >> 2 & 48), 1)
    least = torch.cat((second & 63, third >> 4 | second >> 2 & 48), 1)
    scale, least = _half(blocks, 0) * scale.float(), _half(blocks, 2) * least.float()
    return scale[:, :, None], least[:, :, None]


def _k(blocks: Tensor, codes: Tensor) -> Tensor:
    scale, least = _scales(blocks)
    return (scale * codes.float() - least).flatten(1)


def _low(codes: Tensor) -> Tensor:
    """Return the halves of 128 bytes, [blocks, 8, 32]: low and high ones of each 32 bytes."""
    each = codes.view(-1, 4, 1, 32)
    return torch.cat((each & 15, each >> 4), 2).flatten(1, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k(blocks, _low(blocks[:, 16:].contiguous()))


def _q5_k(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifths = (blocks[:, 16:48, None].mT >> bits & 1) << 4
    return _k(blocks, _low(blocks[:, 48:].contiguous()) | fifths)


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    codes = (low | high).view(-1, 16, 16).float() - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scale[:, :, None] * codes).flatten(1)


_DECODE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
