"""Random weights of codes in groups, by a seed."""

from __future__ import annotations

import torch

from tandem.kernels.grouped_gemm import GroupedWeight
from tandem.kernels.grouped_gemm.packing import pack


def drawn_weight(
    outputs: int, inner: int, *, bits: int, group: int, symmetric: bool
) -> GroupedWeight:
    """On the CPU, with float32 scales; group 0 is all inputs."""
    drawn = torch.Generator().manual_seed(outputs + inner + bits + group)
    groups, top = inner // group if group else 1, 1 << bits
    codes = torch.randint(0, top, (outputs, inner), generator=drawn, dtype=torch.uint8)
    scale = (torch.rand(groups, outputs, generator=drawn) + 0.5) / (top * inner**0.5)
    zeros = torch.randint(0, top, (groups, outputs), generator=drawn, dtype=torch.uint8)
    packed = codes if bits == 8 else pack(codes)
    return GroupedWeight(packed, scale, None if symmetric else zeros, None, bits)
