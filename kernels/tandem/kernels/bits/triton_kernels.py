"""SplitMix64 in jit code, bit for bit that of `tandem.kernels.bits`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logical_shift(value, BY: tl.constexpr):
    """Return int64 `value` shifted right by BY with zeros from the left."""
    return (value >> BY) & ((1 << (64 - BY)) - 1)


@triton.jit
def mix(value):
    """Return SplitMix64's finaliser of int64; the multipliers are signed integers."""
    value = (value ^ logical_shift(value, 30)) * -4658895280553007687
    value = (value ^ logical_shift(value, 27)) * -7723592293110705685
    return value ^ logical_shift(value, 31)


@triton.jit
def place(index):
    """Return the sum of increments from the start of the sequence to `index` (int64, from 0)."""
    return (index + 1) * -7046029254386353131
