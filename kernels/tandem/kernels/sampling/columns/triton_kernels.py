"""Jit code that gathers parameters and makes keys, a program some rows."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.bits.triton_kernels import mix, place
from tandem.kernels.launch.triton_kernels import follow


@triton.jit(do_not_specialize=["rows", "draws", "n", "m"])
def gather_columns(
    seeds, top_k, temperature, min_p, top_p, rows, draws, wide, narrow, n, m, size,
    LAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather columns at `rows` [n], keys of `draws` [3, m]. Grid: cdiv(max(n, m), BLOCK).

    wide int64 [2, size] takes top_k and keys; narrow float32 [3, size] takes temperature, min_p and
    top_p. LAST is the purpose's addend to a key.
    """
    follow(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < n
    row = tl.load(rows + at, mask=real, other=0)
    tl.store(wide + at, tl.load(top_k + row, mask=real), mask=real)
    tl.store(narrow + at, tl.load(temperature + row, mask=real), mask=real)
    tl.store(narrow + size + at, tl.load(min_p + row, mask=real), mask=real)
    tl.store(narrow + 2 * size + at, tl.load(top_p + row, mask=real), mask=real)
    drawn = at < m
    seed = tl.load(seeds + tl.load(draws + at, mask=drawn, other=0), mask=drawn, other=0)
    key = mix(seed + place(tl.zeros_like(seed)))
    key = mix(key + place(tl.load(draws + m + at, mask=drawn, other=0)))
    key = mix(key + place(tl.load(draws + 2 * m + at, mask=drawn, other=0)))
    tl.store(wide + size + at, mix(key + LAST), mask=drawn)
