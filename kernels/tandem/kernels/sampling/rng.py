"""Random bits by counter: they depend on the purpose of a draw, never on earlier draws.

A row's key is a SplitMix64 chain over (seed, choice, output position, purpose); its noise for a
token is the SplitMix64 output at that token's place after the key. Integer arithmetic gives the
same bits on any device.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor, float32

from tandem.kernels.bits import GAMMA, logical_shift, mix, signed

GROUP = 128
"""Tokens of a group, by id. Another size changes the tokens of a seed."""
GROUP_NOISE = 1 << 32
"""Index of the first group's noise, above any token id."""


class Purpose(IntEnum):
    """Decisions that draws make; draws of different purpose at one position are independent."""

    TOKEN = 0
    """The next token."""
    ACCEPT = 1
    """The acceptance of a speculative token."""
    RESIDUAL = 2
    """The token in place of a speculative one that was rejected."""


def row_keys(seeds: Tensor, choices: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Return the keys of one draw a row: int64 [rows].

    `seeds`, `choices` and `positions` (in the output, from 0) are int64 [rows].
    """
    step = signed(GAMMA)
    keys = mix(seeds + step)
    keys = mix(keys + (choices + 1) * step)
    keys = mix(keys + (positions + 1) * step)
    return mix(keys + signed((int(purpose) + 1) * GAMMA))


def uniforms(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return float32 in (0, 1), shaped as `keys` and `tokens` broadcast; 32 random bits each.

    The top 32 bits plus a half, over 2^32, rounded to float32 and kept under 1.
    """
    bits = mix(keys + (tokens + 1) * signed(GAMMA))
    return logical_shift(bits, 32).to(float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return noise of the standard exponential distribution, float32 above 0."""
    return uniforms(keys, tokens).neg_().log1p_().neg_()
