"""Codes of 4 bits in tiles for the matrix unit of Hopper.

A tile is 64 outputs by 128 inputs: 32 words of 16 bits a row. Nibble i of word 8c + 4s + 2h + e is
the code of input 32i + 16s + 8h + 2c + e, so that the words of thread c are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
"""Outputs of a tile."""
BLOCK = 128
"""Inputs of a tile."""
WORDS = 32
"""Words of a tile's row."""
ADDENDS = {torch.bfloat16: 128, torch.float16: 1024}
"""Addend of zero points: a code in the mantissa of this number is their sum."""
_TO_WORDS = (0, 2, 1, 6, 4, 5, 7, 3)
"""From [tile, output, block, nibble, s, h, c, e] to that of words, with nibbles last."""
_FROM_WORDS = (0, 2, 1, 7, 4, 5, 3, 6)
_SHIFTS = (0, 4, 8, 12)


class TiledWeight(NamedTuple):
    """Weight [out, in] whose value is (code - zero) * scale, rounded to ``dtype``."""

    words: Tensor
    """int16 [tiles of outputs * blocks of inputs * TILE, WORDS]."""
    scales: Tensor
    """int32 [tiles * blocks * groups of a block, TILE], two numbers of ``dtype``: the scale in the
    low half, and zero plus the type's addend in the high."""
    outputs: int
    inner: int
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        """Return the groups of a block: 1, 2 or 4."""
        return self.scales.shape[0] * TILE * BLOCK // (self.outputs * self.inner)

    def part(self, first: int, end: int) -> TiledWeight:
        """Return the weight of some tiles of outputs, in the same memory."""
        blocks = self.inner // BLOCK
        words, scales = blocks * TILE, blocks * self.groups
        return self._replace(
            words=self.words[first * words : end * words],
            scales=self.scales[first * scales : end * scales],
            outputs=(end - first) * TILE,
        )


def tiled(codes: Tensor, scale: Tensor, zeros: Tensor | None) -> TiledWeight:
    """Return the tiles of codes uint8 [out, in] below 16, scale [in / group, out] in 16 bits, and
    zeros uint8 as ``scale``, None for 8. Outputs and inputs are in whole tiles."""
    outputs, inner = codes.shape
    tiles, blocks, groups = outputs // TILE, inner // BLOCK, scale.shape[0]
    words = torch.empty(tiles, blocks, TILE, WORDS, dtype=torch.int16, device=codes.device)
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=codes.device)
    for tile in range(tiles):  # bounds the memory of the conversion
        part = codes[tile * TILE : (tile + 1) * TILE].view(1, TILE, blocks, 4, 2, 2, 4, 2)
        nibbles = part.permute(_TO_WORDS).reshape(blocks, TILE, WORDS, 4).to(torch.int32)
        words[tile] = (nibbles << shifts).sum(-1).to(torch.int16)
    if zeros is None:
        zeros = torch.full_like(scale, 8, dtype=torch.uint8)
    if groups == 1:
        scale, zeros = scale.expand(blocks, outputs), zeros.expand(blocks, outputs)
    both = torch.stack((scale, zeros.to(scale.dtype) + ADDENDS[scale.dtype]), -1)
    both = both.view(-1, tiles, TILE, 2).transpose(0, 1).contiguous()
    return TiledWeight(
        words.view(-1, WORDS), both.view(torch.int32).view(-1, TILE), outputs, inner, scale.dtype
    )


def values_of(weight: TiledWeight, tiles: slice) -> Tensor:
    """Return the values of the outputs of some tiles: [outputs, in]."""
    blocks = weight.inner // BLOCK
    words = weight.words.view(-1, blocks, TILE, 4, 2, 2, 2, 1)[tiles].to(torch.int32)
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    codes = ((words >> shifts) & 15).permute(_FROM_WORDS).reshape(len(words), TILE, weight.inner)
    both = weight.scales.view(weight.dtype).view(-1, blocks * weight.groups, TILE, 2)[tiles]
    scale, zeros = both.float().transpose(1, 2).unbind(-1)
    grouped = codes.view(len(words), TILE, scale.shape[2], -1).float()
    shifted = grouped + ADDENDS[weight.dtype] - zeros[..., None]
    return (shifted * scale[..., None]).to(weight.dtype).view(-1, weight.inner)
