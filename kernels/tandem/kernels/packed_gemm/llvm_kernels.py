"""Loops of the products in LLVM's instructions, one function a kernel.

``few`` keeps decoded weights in registers and reads x once an output. ``many`` decodes a tile of
outputs and inputs, which stays in the first cache, and multiplies it by pairs of rows.

A kernel gets the address of ``FIELDS``, 8 bytes each. It computes the share of its OpenMP thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir

from tandem.kernels.llvm.build import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    LONG,
    ONE,
    POINTER,
    Kernel,
    fma,
    zeros,
)

from . import FORMS
from .llvm_blocks import DECODE, Block

FIELDS = ("x", "x_stride", "blocks", "row_bytes", "y", "y_stride", "rows", "inner", "outputs")
"""Addresses, numbers, and strides: in floats, of blocks in bytes."""
FEW = (1, 2, 4)
"""Rows of the variants of ``few``."""
TILE, CHUNK = 8, 512
"""Outputs and inputs of a tile."""
_NARROW = ir.VectorType(FLOAT, 8)
_OUTPUTS = 4
_PER = range(_OUTPUTS)
"""Outputs whose sums with two rows fit in 16 registers."""


def module_of(kind: str) -> ir.Module:
    """Return the kernels of a form: few_1, few_2, few_4 and many."""
    module = ir.Module(kind)
    for rows in FEW:
        _few(_Kernel(module, f"few_{rows}", kind), rows)
    _many(_Kernel(module, "many", kind))
    return module


class _Kernel(Kernel):
    """Product while it is built."""

    def __init__(self, module: ir.Module, name: str, kind: str) -> None:
        super().__init__(module, name, FIELDS)
        self._kind = kind
        self.form = FORMS[kind]
        self.x, self._blocks, self.y = (self.pointer(name) for name in ("x", "blocks", "y"))
        self.x_stride, self.y_stride = self.fields["x_stride"], self.fields["y_stride"]
        self._row_bytes = self.fields["row_bytes"]
        self.rows, self.inner, self.outputs = (self.fields[name] for name in FIELDS[-3:])

    def row(self, number: ir.Value) -> ir.Value:
        """Return ``number``, or the last row's."""
        return self.least(number, self.b.sub(self.rows, ONE))

    def weights(self, output: ir.Value) -> ir.Value:
        """Return the address of an output's blocks."""
        return self.at(self._blocks, self.b.mul(output, self._row_bytes), kind=BYTE)

    def decoded(self, row: ir.Value, number: ir.Value) -> Iterator[ir.Value]:
        """Yield the values of block ``number`` of a row, in FLOATS."""
        place = self.at(row, self.b.mul(number, LONG(self.form.size)), kind=BYTE)
        return DECODE[self._kind](Block(self.b, place))

    def add(self, vectors: Sequence[ir.Value], places: Sequence[ir.Value]) -> None:
        """Add the sum of each vector to the float at its place. Equal places have equal sums: all
        floats are read before one is written."""
        b = self.b
        sums = [self.reduced("fadd", each) for each in vectors]
        before = [b.load(place, typ=FLOAT) for place in places]
        for place, old, new in zip(places, before, sums, strict=True):
            b.store(b.fadd(old, new), place)


def _few(k: _Kernel, rows: int) -> None:
    """Build the product of up to ``rows`` rows; missing ones repeat the last."""
    b, values = k.b, LONG(k.form.values)
    first, end = k.share(k.outputs, TILE)
    numbers = [k.row(LONG(each)) for each in range(rows)]
    xs = [k.at(k.x, b.mul(each, k.x_stride)) for each in numbers]
    ys = [k.at(k.y, b.mul(each, k.y_stride)) for each in numbers]
    with k.loop(end, first=first) as output:
        row = k.weights(output)
        sums = zeros(FLOATS, 2 * rows)  # two chains for each row hide the latency of fma
        with k.loop(b.udiv(k.inner, values), sums=sums) as number:
            for group, weights in enumerate(k.decoded(row, number)):
                for each, x in enumerate(xs, group % 2 * rows):
                    place = k.at(x, b.mul(number, values), LONG(group * LANES))
                    sums[each] = fma(b, weights, b.load(place, typ=FLOATS, align=4), sums[each])
        totals = [b.fadd(*pair) for pair in zip(sums[:rows], sums[rows:], strict=True)]
        k.add(totals, [k.at(y, output) for y in ys])
    b.ret_void()


def _many(k: _Kernel) -> None:
    """Build the product of any number of rows."""
    b = k.b
    tile = b.alloca(ir.ArrayType(FLOAT, TILE * CHUNK))
    tile.align = 64
    tile = b.inttoptr(b.ptrtoint(tile, LONG), POINTER)  # llvmlite's typed pointers hold one type
    first, end = k.share(k.outputs, TILE)
    with k.loop(end, first=first, step=TILE) as output, k.loop(k.inner, step=CHUNK) as start:
        length = k.least(LONG(CHUNK), b.sub(k.inner, start))
        _decode(k, tile, output, start, length)
        with k.loop(k.rows, step=2) as number:
            rows = [number, k.row(b.add(number, ONE))]
            xs = [k.at(k.x, b.mul(each, k.x_stride), start) for each in rows]
            ys = [k.at(k.y, b.mul(each, k.y_stride), output) for each in rows]
            for at in range(0, TILE, _OUTPUTS):
                sums = _sums(
                    k, [k.at(tile, LONG((at + each) * CHUNK)) for each in _PER], xs, length
                )
                for each in _PER:
                    with b.if_then(b.icmp_signed("<", b.add(output, LONG(at + each)), k.outputs)):
                        k.add(sums[2 * each : 2 * each + 2], [k.at(y, LONG(at + each)) for y in ys])
    b.ret_void()


def _decode(
    k: _Kernel, tile: ir.Value, output: ir.Value, start: ir.Value, length: ir.Value
) -> None:
    """Write weights from ``output`` and input ``start`` on to ``tile``; missing outputs repeat the
    last."""
    b, values = k.b, LONG(k.form.values)
    block = b.udiv(start, values)
    with k.loop(LONG(TILE)) as each:
        row = k.weights(k.least(b.add(output, each), b.sub(k.outputs, ONE)))
        with k.loop(b.udiv(length, values)) as number:
            place = b.add(b.mul(each, LONG(CHUNK)), b.mul(number, values))
            for group, weights in enumerate(k.decoded(row, b.add(block, number))):
                b.store(weights, k.at(tile, place, LONG(group * LANES)), align=4)


def _sums(
    k: _Kernel, rows: Sequence[ir.Value], xs: Sequence[ir.Value], length: ir.Value
) -> list[ir.Value]:
    """Return vectors that sum to the product of each weights' row with each x, in that order."""
    b = k.b
    sums = zeros(_NARROW, len(rows) * len(xs))
    with k.loop(length, step=_NARROW.count, sums=sums) as at:
        values = [b.load(k.at(x, at), typ=_NARROW, align=4) for x in xs]
        for each, row in enumerate(rows):
            weights = b.load(k.at(row, at), typ=_NARROW, align=4)
            for number, value in enumerate(values, each * len(xs)):
                sums[number] = fma(b, weights, value, sums[number])
    return sums
