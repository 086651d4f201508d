"""Instructions of which the kernels of a CPU are made, in vectors of 16 floats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

LANES = 16
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT, POINTER = ir.HalfType(), ir.FloatType(), ir.PointerType()
BYTES, SHORTS, INTS, HALVES, FLOATS = (
    ir.VectorType(each, LANES) for each in (BYTE, SHORT, INT, HALF, FLOAT)
)
BITS = ir.VectorType(ir.IntType(1), LANES)
THREAD, THREADS = "omp_get_thread_num", "omp_get_num_threads"
EXTERNAL = (THREAD, THREADS)
"""Functions that kernels call."""
ONE, ZERO = LONG(1), LONG(0)


def constant(kind: ir.Type, number: float) -> ir.Constant:
    """Return ``number`` in ``kind``, in all lanes of a vector."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def spread(b: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Return a float in all lanes."""
    blank = ir.Constant(FLOATS, ir.Undefined)
    return b.shuffle_vector(b.insert_element(blank, number, INT(0)), blank, constant(INTS, 0))


def function_of(
    module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]
) -> ir.Function:
    """Return the declaration of a function, made once."""
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(result, arguments), name)


def fma(b: ir.IRBuilder, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
    """Return one * other + total of vectors of floats, rounded once."""
    kind = total.type
    name = f"llvm.fma.v{kind.count}f32"
    return b.call(function_of(b.module, name, kind, [kind] * 3), [one, other, total])


def unary(b: ir.IRBuilder, name: str, x: ir.Value) -> ir.Value:
    """Return LLVM's function ``name`` (sqrt, rint) of a float, or of each in a vector."""
    suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
    return b.call(function_of(b.module, f"llvm.{name}.{suffix}", x.type, [x.type]), [x])


_LEAST, _MOST = -87.0, 88.0
"""Exponents within which e^x is a normal float32."""
_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""Coefficients of (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, highest first (expf of Cephes)."""
_LN2 = (0.693359375, -2.12194440e-4)
"""ln(2) as the sum of a short number and a rest, so that multiples of the first are exact."""


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return e^x of FLOATS within 2 units in the last place, x clamped to -87 and 88; NaN stays."""
    for sign, bound in (("<", _LEAST), (">", _MOST)):
        end = constant(FLOATS, bound)
        x = b.select(b.fcmp_ordered(sign, x, end), end, x)
    power = unary(b, "rint", b.fmul(x, constant(FLOATS, math.log2(math.e))))
    for part in _LN2:
        x = fma(b, power, constant(FLOATS, -part), x)
    total = constant(FLOATS, _TERMS[0])
    for term in _TERMS[1:]:
        total = fma(b, total, x, constant(FLOATS, term))
    total = fma(b, total, b.fmul(x, x), b.fadd(x, constant(FLOATS, 1.0)))
    bits = b.shl(b.add(b.fptosi(power, INTS), constant(INTS, 127)), constant(INTS, 23))
    return b.fmul(total, b.bitcast(bits, FLOATS))


def zeros(kind: ir.VectorType, count: int) -> list[ir.Value]:
    """Return ``count`` vectors of zeros, the first values of sums."""
    return [ir.Constant(kind, [0.0] * kind.count)] * count


class Kernel:
    """One function while it is built. Its argument is the address of its fields, 8 bytes each."""

    def __init__(self, module: ir.Module, name: str, fields: Sequence[str]) -> None:
        self.module = module
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        self.b = ir.IRBuilder(function.append_basic_block())
        self.fields = {
            name: self.b.load(self.at(function.args[0], LONG(at), kind=LONG), typ=LONG)
            for at, name in enumerate(fields)
        }

    def pointer(self, field: str) -> ir.Value:
        return self.b.inttoptr(self.fields[field], POINTER)

    def number(self, field: str) -> ir.Value:
        """Return the float whose bits the field has."""
        return self.b.bitcast(self.b.trunc(self.fields[field], INT), FLOAT)

    def share(self, count: ir.Value, unit: int = 1) -> tuple[ir.Value, ir.Value]:
        """Return the first of ``count`` items of this thread and the one after its last; a multiple
        of ``unit`` but for the end."""
        b = self.b
        number, threads = (
            b.sext(b.call(function_of(self.module, each, INT, []), []), LONG) for each in EXTERNAL
        )
        units = b.udiv(b.add(count, LONG(unit - 1)), LONG(unit))
        first, end = (
            b.mul(b.udiv(b.mul(units, each), threads), LONG(unit))
            for each in (number, b.add(number, ONE))
        )
        return first, self.least(end, count)

    def at(self, base: ir.Value, *offsets: ir.Value, kind: ir.Type = FLOAT) -> ir.Value:
        """Return the address of element ``sum(offsets)``."""
        total = offsets[0]
        for each in offsets[1:]:
            total = self.b.add(total, each)
        return self.b.gep(base, [total], source_etype=kind)

    def least(self, one: ir.Value, other: ir.Value) -> ir.Value:
        return self.b.select(self.b.icmp_signed("<", one, other), one, other)

    def floats(self, base: ir.Value, *offsets: ir.Value) -> ir.Value:
        """Return FLOATS from element ``sum(offsets)`` on."""
        return self.b.load(self.at(base, *offsets), typ=FLOATS, align=4)

    def put(self, value: ir.Value, base: ir.Value, *offsets: ir.Value) -> None:
        """Write a vector of floats from element ``sum(offsets)`` on."""
        self.b.store(value, self.at(base, *offsets), align=4)

    def reduced(self, name: str, vector: ir.Value) -> ir.Value:
        """Return the sum (fadd) or the largest (fmax) of a vector of floats, in any order."""
        kind = vector.type
        first = [FLOAT(0.0)] if name == "fadd" else []
        types = [each.type for each in (*first, vector)]
        function = function_of(
            self.module, f"llvm.vector.reduce.{name}.v{kind.count}f32", FLOAT, types
        )
        return self.b.call(function, [*first, vector], fastmath=("reassoc",))

    @contextmanager
    def loop(
        self,
        end: ir.Value,
        *,
        first: ir.Value = ZERO,
        step: int = 1,
        sums: list[ir.Value] | None = None,
    ) -> Iterator[ir.Value]:
        """Build a loop, and yield its index. ``sums`` hold values before the loop; the body
        replaces them by the next ones. Afterwards they are the last."""
        b, before = self.b, self.b.block
        sums = [] if sums is None else sums
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(LONG)
        index.add_incoming(first, before)
        carried = [b.phi(each.type) for each in sums]
        for phi, each in zip(carried, sums, strict=True):
            phi.add_incoming(each, before)
        b.cbranch(b.icmp_signed("<", index, end), body, done)
        b.position_at_end(body)
        sums[:] = carried
        yield index
        index.add_incoming(b.add(index, LONG(step)), b.block)
        for phi, each in zip(carried, sums, strict=True):
            phi.add_incoming(each, b.block)
        b.branch(head)
        b.position_at_end(done)
        sums[:] = carried


def inverse_rms(k: Kernel, x: ir.Value, dim: ir.Value) -> ir.Value:
    """Return 1 / sqrt(mean(x^2) + eps) of ``dim`` floats as FLOATS; fields are ``eps``, and
    ``part``, which is 1 / dim."""
    b, squares = k.b, zeros(FLOATS, 1)
    with k.loop(dim, step=LANES, sums=squares) as at:
        value = k.floats(x, at)
        squares[0] = fma(b, value, value, squares[0])
    mean = b.fmul(k.reduced("fadd", squares[0]), k.number("part"))
    root = unary(b, "sqrt", b.fadd(mean, k.number("eps")))
    return spread(b, b.fdiv(FLOAT(1.0), root))
