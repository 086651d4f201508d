"""Decoding of blocks in LLVM's instructions, in vectors of 16 values.

Values equal those of ``reference``, bit by bit: a scale times a code is exact in float32, so that
the sum with a minimum is rounded once in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from llvmlite import ir

from tandem.kernels.llvm.build import (
    BITS,
    BYTE,
    BYTES,
    FLOAT,
    FLOATS,
    HALF,
    HALVES,
    INTS,
    LONG,
    SHORT,
    SHORTS,
    constant,
    fma,
    spread,
)

Groups = Iterator[ir.Value]
"""The values of a block in order, FLOATS each."""


class Block:
    """Encoded block at an address, read by a function that is being built."""

    def __init__(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        self.b = builder
        self._address = address

    def load(self, kind: ir.Type, offset: int) -> ir.Value:
        place = self.b.gep(self._address, [LONG(offset)], source_etype=BYTE)
        return self.b.load(place, typ=kind, align=1)

    def half(self, offset: int) -> ir.Value:
        """Return a float16 as FLOATS."""
        return spread(self.b, self.b.fpext(self.load(HALF, offset), FLOAT))

    def field(self, codes: ir.Value, shift: int, mask: int) -> ir.Value:
        """Return (codes >> shift) & mask, of INTS or one byte."""
        shifted = self.b.lshr(codes, constant(codes.type, shift))
        return self.b.and_(shifted, constant(codes.type, mask))

    def wide(self, offset: int) -> ir.Value:
        """Return 16 bytes as INTS. LLVM widens those of the same offset once."""
        return self.b.zext(self.load(BYTES, offset), INTS)

    def floats(self, codes: ir.Value, offset: int = 0) -> ir.Value:
        """Return INTS plus ``offset`` as FLOATS."""
        return self.b.sitofp(self.b.add(codes, constant(INTS, offset)), FLOATS)

    def scaled(self, scale: ir.Value, number: ir.Value) -> ir.Value:
        """Return FLOATS ``scale`` times a float."""
        return self.b.fmul(scale, spread(self.b, number))


def _f32(block: Block) -> Groups:
    for at in (0, 64):
        yield block.load(FLOATS, at)


def _f16(block: Block) -> Groups:
    for at in (0, 32):
        yield block.b.fpext(block.load(HALVES, at), FLOATS)


def _bf16(block: Block) -> Groups:
    for at in (0, 32):
        bits = block.b.shl(block.b.zext(block.load(SHORTS, at), INTS), constant(INTS, 16))
        yield block.b.bitcast(bits, FLOATS)


def _q8_0(block: Block) -> Groups:
    d = block.half(0)
    for at in (2, 18):
        codes = block.b.sext(block.load(BYTES, at), INTS)
        yield block.b.fmul(block.b.sitofp(codes, FLOATS), d)


def _q4_0(block: Block) -> Groups:
    d, codes = block.half(0), block.wide(2)
    for shift in (0, 4):
        yield block.b.fmul(d, block.floats(block.field(codes, shift, 15), -8))


def _q4_1(block: Block) -> Groups:
    d, least, codes = block.half(0), block.half(2), block.wide(4)
    for shift in (0, 4):
        yield fma(block.b, d, block.floats(block.field(codes, shift, 15)), least)


def _of_five_bits(block: Block, high: int, low: int) -> Iterator[ir.Value]:
    """Yield the codes of 32 values; their fifth bits are 4 bytes at ``high``."""
    b, codes = block.b, block.wide(low)
    for half, shift in enumerate((0, 4)):
        mask = b.bitcast(block.load(SHORT, high + 2 * half), BITS)
        fifth = b.select(mask, constant(INTS, 16), constant(INTS, 0))
        yield b.or_(block.field(codes, shift, 15), fifth)


def _q5_0(block: Block) -> Groups:
    d = block.half(0)
    for codes in _of_five_bits(block, 2, 6):
        yield block.b.fmul(d, block.floats(codes, -16))


def _q5_1(block: Block) -> Groups:
    d, least = block.half(0), block.half(2)
    for codes in _of_five_bits(block, 4, 8):
        yield fma(block.b, d, block.floats(codes), least)


def _scale_and_least(block: Block, number: int) -> tuple[ir.Value, ir.Value]:
    """Return the 6-bit scale and minimum of 32 values of a Q4_K or Q5_K block, a byte each."""
    first, second = block.load(BYTE, 4 + number % 4), block.load(BYTE, 8 + number % 4)
    if number < 4:
        return block.field(first, 0, 63), block.field(second, 0, 63)
    b, third = block.b, block.load(BYTE, 8 + number)
    high = [block.field(each, 2, 48) for each in (first, second)]
    return b.or_(block.field(third, 0, 15), high[0]), b.or_(block.field(third, 4, 15), high[1])


def _k(block: Block, low: int, fifths: int | None) -> Groups:
    """Yield the values of codes at ``low``; their fifth bits, if any, are at ``fifths``."""
    b, d, dmin = block.b, block.half(0), block.half(2)
    for number in range(8):
        scale, least = (
            block.scaled(factor, b.uitofp(each, FLOAT))
            for factor, each in zip((d, dmin), _scale_and_least(block, number), strict=True)
        )
        least = b.fneg(least)
        for part in (0, 16):
            codes = block.field(block.wide(low + number // 2 * 32 + part), number % 2 * 4, 15)
            if fifths is not None:
                fifth = block.field(block.wide(fifths + part), number, 1)
                codes = b.or_(codes, b.shl(fifth, constant(INTS, 4)))
            yield fma(b, scale, block.floats(codes), least)


def _q4_k(block: Block) -> Groups:
    return _k(block, 16, None)


def _q5_k(block: Block) -> Groups:
    return _k(block, 48, 16)


def _q6_k(block: Block) -> Groups:
    b, d = block.b, block.half(208)
    for group in range(16):
        half, number, part = group // 8, group % 8 // 2, group % 2 * 16
        low = block.wide(half * 64 + number % 2 * 32 + part)
        high = block.field(block.wide(128 + half * 32 + part), number * 2, 3)
        codes = b.or_(block.field(low, number // 2 * 4, 15), b.shl(high, constant(INTS, 4)))
        scale = block.scaled(d, b.sitofp(block.load(BYTE, 192 + group), FLOAT))
        yield b.fmul(scale, block.floats(codes, -32))


DECODE: Mapping[str, Callable[[Block], Groups]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
