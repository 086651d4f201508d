"""Batches over pages of e4m3 codes, and their attention in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tests.kernels import score_cases
from torch import Tensor

from tandem.kernels.attention import PagedBatch, Scores
from tandem.kernels.narrow.codes import from_codes, to_codes
from tandem.kernels.rotary_kv import Rotation, SlotMapping

NAN, ONE = 0x7F, 0x38


class Case(NamedTuple):
    """One call, whose pages hold codes of `unused` except for keys in a window."""

    q: Tensor
    kv: Tensor
    batch: PagedBatch
    scales: Tensor
    """float32 [2, kv_heads], all different."""
    numbers: score_cases.Case
    """The same call over numbers, each a code times its scale."""

    def want(self, scores: Scores) -> Tensor:
        """Return attention in float64, [tokens, heads, dim]."""
        return self.numbers.want(scores)


def make(
    lengths: list[int],
    queries: list[int],
    *,
    kv_heads: int = 2,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    unused: int = NAN,
    **shape: Any,
) -> Case:
    """Return ``score_cases.make`` with pages of codes."""
    made = score_cases.make(lengths, queries, kv_heads=kv_heads, dtype=dtype, **shape)
    scales = torch.linspace(0.02, 0.3, 2 * kv_heads).view(2, kv_heads)
    codes = to_codes(made.kv, scales[:, :, None, None])
    codes = torch.where(made.kv.isnan(), unused, codes)
    parts = [
        [_rounded(each, scale) for each in numbers]
        for numbers, scale in zip((made.keys, made.values), scales, strict=True)
    ]
    batch = replace(
        made.batch,
        cu_seqlens_q=made.batch.cu_seqlens_q.to(device),
        seq_lens=made.batch.seq_lens.to(device),
        block_tables=made.batch.block_tables.to(device),
        memo={},
    )
    kv = torch.stack((codes, codes), 1)[:, 1].to(device).view(torch.float8_e4m3fn)
    numbers = made._replace(keys=parts[0], values=parts[1])
    return Case(made.q.to(device), kv, batch, scales.to(device), numbers)


def _rounded(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return float64 [keys, kv_heads, dim] as codes times scales [kv_heads]."""
    scale = scales.view(1, -1, 1)
    codes = to_codes(numbers.float(), scale).view(torch.float8_e4m3fn)
    return codes.double() * scale.double()


class RotaryCall(NamedTuple):
    """Arguments of rotary_kv for pages of codes, of which some numbers saturate."""

    qkv: Tensor
    kv: Tensor
    rotation: Rotation
    slots: SlotMapping
    scales: Tensor


def rotary_call(
    *,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    tokens: int = 21,
    kv_heads: int = 2,
    exact: bool = False,
) -> RotaryCall:
    """Return a call; of an ``exact`` one, k and v are codes times scales and are not rotated."""
    torch.manual_seed(dim)
    scales = torch.linspace(0.02, 0.3, 2 * kv_heads).view(2, kv_heads)
    qkv = torch.randn(tokens, 3 * kv_heads + 2 * kv_heads, dim)
    angles = torch.rand(tokens, dim // 2) * 6
    if exact:
        scales, angles = 2.0 ** torch.arange(-5, 2 * kv_heads - 5).view(2, kv_heads), 0 * angles
        ones = scales.new_ones(3 * kv_heads)
        steps = torch.cat((ones, scales.flatten())).unsqueeze(1)
        qkv = from_codes(to_codes(qkv, torch.tensor(1.0)), torch.float32) * steps
    qkv[::5] *= 1024
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))
    places = torch.randperm(3 * 16)[:tokens]
    kv = torch.randint(0, 127, (3, 2, kv_heads, 16, dim), dtype=torch.uint8)
    return RotaryCall(
        qkv.to(dtype).to(device),
        kv.to(device).view(torch.float8_e4m3fn),
        Rotation(*(each.to(dtype).to(device) for each in rotation)),
        SlotMapping((places // 16).to(device), (places % 16).to(device)),
        scales.to(device),
    )
