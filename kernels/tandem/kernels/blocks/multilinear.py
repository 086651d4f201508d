"""64-bit digest in two levels, so that chunks can be hashed in any order on any device.

Level 1, per chunk j of 1,024 little-endian 64-bit words x_i (the last is padded by zeros): s1 = sum
K1_i * x_i, s2 = sum K2_i * (x_i >> 32), mod 2^64. It is multilinear hashing (Lemire & Kaser,
"Strongly universal string hashing is fast", 2014) of 32-bit characters under 64-bit keys: chunks
collide with about 2^-32.

Level 2: digest = bytes + sum_j mix(s1_j + mix(s2_j + (j + 1) * GAMMA)) mod 2^64, a sum in any
order. Keys are the SplitMix64 sequence from a fixed seed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tandem.kernels.bits import GAMMA, mix, mix_int, signed

WORDS = 1024
"""Words of a chunk: 8 KiB, which a GPU program or a CPU's first cache holds."""

_SEED = 0x74616E64656D0001
_AT_ONCE = 64
"""Chunks per pass, whose temporary fits a CPU's second cache."""


def add_digest(data: Tensor, total: Tensor) -> None:
    """Add the digest of flat uint8 `data` to int64 [1]."""
    chunk = WORDS * 8
    whole = data.numel() // chunk * chunk
    sums = [_chunk_sums(_words(data[:whole]))]
    if whole < data.numel():
        last = data.new_zeros(chunk)
        last[: data.numel() - whole] = data[whole:]
        sums.append(_chunk_sums(_words(last)))
    s1 = torch.cat([low for low, _ in sums])
    s2 = torch.cat([high for _, high in sums])
    total += _combine(s1, s2, data.numel())


def _chunk_sums(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return level 1 of int64 [chunks, WORDS]."""
    low, high = chunk_keys(str(words.device))
    s1 = torch.empty(words.shape[0], dtype=torch.int64, device=words.device)
    s2 = torch.empty_like(s1)
    for first in range(0, words.shape[0], _AT_ONCE):
        part = words[first : first + _AT_ONCE]
        torch.mv(part, low, out=s1[first : first + _AT_ONCE])
        torch.mv(part >> 32, high, out=s2[first : first + _AT_ONCE])
    return s1, s2


def _combine(s1: Tensor, s2: Tensor, num_bytes: int) -> Tensor:
    place = torch.arange(1, s1.shape[0] + 1, device=s1.device) * signed(GAMMA)
    terms = mix(s1 + mix(s2 + place))
    return terms.sum() + num_bytes


def _words(data: Tensor) -> Tensor:
    """Return whole chunks of bytes as int64 [chunks, WORDS]; copied only if not aligned."""
    if data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64).view(-1, WORDS)


@cache
def chunk_keys(device: str) -> tuple[Tensor, Tensor]:
    """Return K1 and K2, int64 [WORDS] each, on a device; made once for each."""
    values = [signed(mix_int(_SEED + i * GAMMA)) for i in range(1, 2 * WORDS + 1)]
    both = torch.tensor(values, dtype=torch.int64, device=device)
    return both[:WORDS].contiguous(), both[WORDS:].contiguous()
