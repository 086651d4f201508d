"""64-bit integer arithmetic on tensors, wrap-around int64, equal bit for bit to the GPU kernels'.

SplitMix64 (Steele, Lea, Flood, 2014; constants of Stafford's variant 13) on Python integers and on
int64 tensors.
"""

from __future__ import annotations

from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
"""Odd increment of the SplitMix64 sequence, 2^64 over the golden ratio."""
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """Return the int64 that has the bits of `value` mod 2^64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix_int(value: int) -> int:
    """Return SplitMix64's finaliser, a bijection of 64-bit integers, in 0 .. 2^64 - 1."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 31)


def mix(values: Tensor) -> Tensor:
    """Return `mix_int` of each element of an int64 tensor."""
    values = _fold(values, 30).mul_(signed(_MULTIPLY_1))
    values = _fold(values, 27).mul_(signed(_MULTIPLY_2))
    return _fold(values, 31)


def logical_shift(values: Tensor, by: int) -> Tensor:
    """Return int64 `values` shifted right by 1 to 63 bits with zeros from the left."""
    return (values >> by).bitwise_and_((1 << (64 - by)) - 1)


def _fold(values: Tensor, by: int) -> Tensor:
    return logical_shift(values, by).bitwise_xor_(values)
