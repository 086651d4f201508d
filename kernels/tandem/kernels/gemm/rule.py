"""Form of a product that is in no table, on a Hopper device that has a table.

Derived from measurements on an H200 (`scripts/tune_gemm.py --times`; docs/kernels.md). There is no
form above 64 rows, where cuBLAS is as fast, or if no tile divides the shape.
"""

from __future__ import annotations

from .form import Form, Kind

TILE = 64
"""Outputs of the smallest tile, and the least part of the inner size that is taken at a time."""
FEWEST = 28
"""Number of programs below which cuBLAS is as fast."""
SHORT = 2048
"""Inner size up to which parts do not pay."""
LONG = 8192
"""Inner size from which each program's share has to be small."""
MOST_ROWS = 64
_MOST_STAGES = 12


def form_of(kind: Kind, outputs: int, inner: int, rows: int, programs: int) -> Form | None:
    """Return the form for up to `rows` (one of the classes), or None. The device runs `programs`
    programs at once."""
    if rows > MOST_ROWS:
        return None
    if rows == 1:
        return _one_row(kind, outputs, inner, programs)
    return _streamed(kind, outputs, inner, rows, programs)


def _one_row(kind: Kind, outputs: int, inner: int, programs: int) -> Form | None:
    """Return the form of whole rows without the matrix unit, if wide pieces divide them."""
    if kind is Kind.GATED:
        return _streamed(kind, outputs, inner, 1, programs) if inner <= SHORT else None
    piece = _divisor(inner, min(1024, inner // 2))
    if piece < 512 or inner > LONG + LONG // 2:
        return _streamed(kind, outputs, inner, 1, programs)
    each = 2 if outputs >= 4096 and inner > SHORT else 4
    return None if outputs % each else Form(each, piece)


def _streamed(kind: Kind, outputs: int, inner: int, rows: int, programs: int) -> Form | None:
    """Return the form of tiles through shared memory with as many programs as the shape allows."""
    tiles = outputs // TILE
    if outputs % TILE or (rows > 16 and inner > 2 * LONG):
        return None
    wide = rows > 16 and tiles >= 2 * programs and outputs % (2 * TILE) == 0
    if wide and _share(tiles // 2, programs) <= _share(tiles, programs):
        return _ring(2 * TILE, _divisor(inner, 128), 1, rows)
    most = 256 if rows <= 32 or inner <= SHORT else 128
    split = 1 if kind is Kind.GATED else _split(tiles, inner, rows, programs)
    piece = _divisor(inner // split, most)
    if tiles * split < FEWEST or (piece < 128 and inner > LONG and rows not in (16, 32)):
        return None
    return _ring(TILE, piece, split, rows)


def _split(tiles: int, inner: int, rows: int, programs: int) -> int:
    """Return the fewest parts of the inner size that make a program's share small, else those with
    the smallest share."""
    ways = [n for n in (1, 2, 4, 8) if inner % (n * TILE) == 0 and (n < 8 or tiles <= 16)]
    if tiles >= 2 * programs:
        return 1
    if inner <= SHORT:
        return next((n for n in ways if tiles * n >= FEWEST), 1)
    enough = 84 if inner > LONG else 56 if rows > 32 and inner <= 5120 else 72
    fine = (n for n in ways if _share(tiles * n, programs) * enough <= 1)
    return next(fine, min(ways, key=lambda n: (_share(tiles * n, programs), n), default=1))


def _share(pieces: int, programs: int) -> float:
    """Return the share of the weight that the program with the most work reads."""
    return -(-pieces // programs) / pieces


def _ring(outputs: int, inner: int, split: int, rows: int) -> Form | None:
    """Return the form with as many stages as shared memory holds."""
    from .gluon import ring_fits  # requires Triton's Gluon

    if inner < TILE:
        return None
    rings = (Form(outputs, inner, split, n, stream=True) for n in range(_MOST_STAGES, 2, -1))
    return next((form for form in rings if ring_fits(form, rows)), None)


def _divisor(number: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides a number."""
    return min(number & -number, 1 << (most.bit_length() - 1))
