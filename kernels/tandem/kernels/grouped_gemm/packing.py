"""Layout of codes of 4 bits: two a byte, from the two halves of each block of inputs.

Byte i of a block has the code of its input i in the low bits and that of input i + ``HALF`` in the
high bits. So low and high bits are two matrices of consecutive inputs, which need no interleaving.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Inputs of a block; the last one is padded with zeros."""
HALF = BLOCK // 2


def packed_width(inner: int, bits: int) -> int:
    """Return the bytes of one output's codes."""
    return inner if bits == 8 else -(-inner // BLOCK) * HALF


def pack(codes: Tensor) -> Tensor:
    """Return codes uint8 [out, in] below 16 as uint8 [out, blocks * HALF]."""
    outputs, inner = codes.shape
    halves = pad(codes, (0, -inner % BLOCK)).view(outputs, -1, 2, HALF)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def unpack(packed: Tensor, inner: int) -> Tensor:
    """Return the codes uint8 [out, inner] of ``pack``."""
    blocks = packed.reshape(len(packed), -1, HALF)
    return torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)[:, :inner]
