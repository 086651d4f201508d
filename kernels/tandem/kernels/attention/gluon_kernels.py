"""Jit code that decode and prefill attention share on Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.jit
def blank_rows(v, first, last, D: gl.constexpr, TOKENS: gl.constexpr):
    """Zero rows first..last - 1 of a V tile [TOKENS, D] in shared memory, by four warps.

    A page's unused rows may hold anything, and 0 x NaN is NaN.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for part in gl.static_range(TOKENS // 16):
        piece = v.slice(part * 16, 16, dim=0)
        row = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, L))
        x = piece.load(L)
        blank = (row >= first) & (row < last)
        piece.store(gl.where(gl.expand_dims(blank, 1), gl.zeros_like(x), x))
    fence_async_shared()
