"""Decode attention in LLVM's instructions, a kernel for each head size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from llvmlite import ir

from tandem.kernels.llvm.build import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    LONG,
    ONE,
    ZERO,
    Kernel,
    constant,
    exp,
    fma,
    spread,
    zeros,
)
from tandem.kernels.llvm.compiled import Address, compiled

FIELDS = (
    *("q", "sequence_stride", "q_head_stride", "out", "powers", "width"),
    *("kv", "block_stride", "kv_stride", "head_stride", "block_size", "heads", "group"),
    *("tables", "table_stride", "seq_lens", "pairs", "window", "scale"),
)
_LOWEST = float("-inf")


class _Pair:
    """A sequence's pages of one KV head."""

    def __init__(self, k: Kernel, sequence: ir.Value, head: ir.Value) -> None:
        self._k, b, field = k, k.b, k.fields
        self._pages = k.at(
            k.pointer("kv"), b.mul(b.udiv(head, field["group"]), field["head_stride"])
        )
        self._table = k.at(k.pointer("tables"), b.mul(sequence, field["table_stride"]), kind=INT)
        place = k.at(k.pointer("seq_lens"), sequence, kind=INT)
        self._length = b.sext(b.load(place, typ=INT), LONG)
        self.count = k.least(self._length, field["window"])
        self._first = b.sub(self._length, self.count)

    @contextmanager
    def keys(
        self, dim: int, sums: list[ir.Value] | None = None
    ) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Build a loop over visible keys; yield a key's number among them and its address."""
        k, b, size = self._k, self._k.b, self._k.fields["block_size"]
        last = b.udiv(b.add(self._length, b.sub(size, ONE)), size)
        with k.loop(last, first=b.udiv(self._first, size), sums=sums) as column:
            block = b.sext(b.load(k.at(self._table, column, kind=INT), typ=INT), LONG)
            page = k.at(self._pages, b.mul(block, k.fields["block_stride"]))
            begin = b.mul(column, size)
            before = b.sub(self._first, begin)
            first = b.select(b.icmp_signed(">", before, ZERO), before, ZERO)
            end = k.least(size, b.sub(self._length, begin))
            shift = b.sub(begin, self._first)
            with k.loop(end, first=first, sums=sums) as token:
                yield b.add(token, shift), k.at(page, b.mul(token, LONG(dim)))


@cache
def kernel_of(dim: int) -> Address:
    """Return the kernel for heads of ``dim`` numbers, whole vectors."""
    module = ir.Module("decode")
    k = Kernel(module, "decode", FIELDS)
    b, field = k.b, k.fields
    first, end = k.share(field["pairs"])
    with k.loop(end, first=first) as number:
        sequence, head = b.udiv(number, field["heads"]), b.urem(number, field["heads"])
        powers = k.at(k.pointer("powers"), b.mul(number, field["width"]))
        q = k.at(
            k.pointer("q"),
            *(b.mul(sequence, field["sequence_stride"]), b.mul(head, field["q_head_stride"])),
        )
        pages = _Pair(k, sequence, head)
        largest = _scores(k, pages, q, powers, dim)
        total = _powers(k, powers, pages.count, largest)
        out = k.at(k.pointer("out"), b.mul(number, LONG(dim)))
        _values(k, pages, powers, total, out, dim)
    b.ret_void()
    return compiled(module)["decode"]


def _scores(k: Kernel, pages: _Pair, q: ir.Value, powers: ir.Value, dim: int) -> ir.Value:
    """Write the scores, and -inf up to a whole vector; return the largest."""
    b, scale = k.b, spread(k.b, k.number("scale"))
    query = [b.fmul(k.floats(q, LONG(at)), scale) for at in range(0, dim, LANES)]
    largest: list[ir.Value] = [FLOAT(_LOWEST)]
    with pages.keys(dim, largest) as (number, key):
        score = b.fmul(query[0], k.floats(key, ZERO))
        for each, part in enumerate(query[1:], 1):
            score = fma(b, part, k.floats(key, LONG(each * LANES)), score)
        found = k.reduced("fadd", score)
        b.store(found, k.at(powers, number))
        largest[0] = b.select(b.fcmp_ordered(">", found, largest[0]), found, largest[0])
    whole = b.and_(b.add(pages.count, LONG(LANES - 1)), LONG(-LANES))
    with k.loop(whole, first=pages.count) as at:
        b.store(FLOAT(_LOWEST), k.at(powers, at))
    return largest[0]


def _powers(k: Kernel, powers: ir.Value, count: ir.Value, largest: ir.Value) -> ir.Value:
    """Replace scores by e^(score - largest); return the sum."""
    b, offset, sums = k.b, spread(k.b, largest), zeros(FLOATS, 1)
    with k.loop(count, step=LANES, sums=sums) as at:
        power = exp(b, b.fsub(k.floats(powers, at), offset))
        k.put(power, powers, at)
        sums[0] = b.fadd(sums[0], power)
    return k.reduced("fadd", sums[0])


def _values(
    k: Kernel, pages: _Pair, powers: ir.Value, total: ir.Value, out: ir.Value, dim: int
) -> None:
    """Write the sum of the values times their powers, divided by ``total``."""
    b, parts = k.b, range(0, dim, LANES)
    sums = zeros(FLOATS, len(parts))
    with pages.keys(dim, sums) as (number, key):
        power = spread(b, b.load(k.at(powers, number), typ=FLOAT))
        for each, at in enumerate(parts):
            value = k.floats(key, k.fields["kv_stride"], LONG(at))
            sums[each] = fma(b, power, value, sums[each])
    factor = b.fdiv(constant(FLOATS, 1.0), spread(b, total))
    for at, each in zip(parts, sums, strict=True):
        k.put(b.fmul(each, factor), out, LONG(at))
