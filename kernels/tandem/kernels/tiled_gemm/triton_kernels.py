"""Jit code that decodes tiles of codes, a program a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import let_go


@triton.jit
def decode_tiles(
    words, scales, out, inner,
    ADDEND: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write (code - zero) * scale to out [outputs, inner], dense. Grid: (tiles of outputs, blocks
    of inputs).

    words and scales as in TiledWeight; scales are numbers of out's type, scale and zero + ADDEND.
    """
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    n, word = tl.arange(0, TILE), tl.arange(0, WORDS)
    held = tl.load(words + (tile * TILE + n).to(tl.int64)[:, None] * WORDS + word[None, :])
    let_go(PDL)
    # Word 8c + 4s + 2h + e has inputs 16s + 8h + 2c + e of each nibble.
    inside = word % 8 // 4 * 16 + word % 4 // 2 * 8 + word // 8 * 2 + word % 2
    row = (tl.program_id(0) * TILE + n).to(tl.int64)[:, None] * inner
    for i in tl.static_range(4):
        at = ((tile * GROUPS + i * GROUPS // 4) * TILE + n) * 2
        scale = tl.load(scales + at).to(tl.float32)[:, None]
        zero = tl.load(scales + at + 1).to(tl.float32)[:, None] - ADDEND
        code = ((held.to(tl.int32) >> (4 * i)) & 15).to(tl.float32)
        value = (code - zero) * scale
        to = out + row + tl.program_id(1) * BLOCK + 32 * i + inside[None, :]
        tl.store(to, value.to(out.dtype.element_ty))
