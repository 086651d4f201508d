"""Triton's latent attention against float64 and the reference, on a GPU or interpreted."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, NEEDS
from tests.kernels.latent_cases import BATCHES, SMALL, Sizes, latent_case

from tandem.kernels import Backend
from tandem.kernels.mla import (
    LATENT_KV,
    ROTARY_PAIRS,
    LatentNorm,
    mla_decode,
    mla_prefill,
    triton,
)
from tandem.kernels.rotary_kv import Rotation, SlotMapping
from tandem.kernels.testing import hold

pytestmark = NEEDS
ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}
REAL = Sizes(heads=16, rank=512, rope=64, nope=128, value=128, page=64)
SIZES = [SMALL, REAL] if GPU else [SMALL]


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", list(dict.fromkeys((*DTYPES, torch.float32))))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("lengths", "queries"), BATCHES)
def test_attention_equals_float64(lengths, queries, sizes, dtype, monkeypatch):
    """Keys are attended whole, and in parts that are merged."""
    case = latent_case(lengths, queries, sizes=sizes, dtype=dtype, device=DEVICE)
    for split, numbers in ((2**20, 1 << 28), (9, 16)):
        monkeypatch.setattr(triton, "_LEAST_SPLIT", split)
        monkeypatch.setattr(triton, "EXPANDED_BYTES", numbers)
        latent = mla_decode(*case.absorbed, case.kv, case.batch, case.scale, backend=Backend.TRITON)
        assert gap(latent, case.latent_answer()) < ERROR[dtype]
        expanded = mla_prefill(
            case.q, case.kv, case.kv_b, case.batch, case.scale, backend=Backend.TRITON
        )
        assert gap(expanded, case.answer()) < 2 * ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_rows_equal_the_reference(dtype):
    torch.manual_seed(0)
    rank, rope, tokens = 24, 12, 5
    kv_a = torch.randn(tokens, 40).to(dtype).to(DEVICE)[:, :36]
    pages = torch.zeros(4, 3, 16, rank + rope, dtype=dtype, device=DEVICE)
    places = torch.tensor([[3, 0, 2, 2, 1], [15, 0, 7, 8, 4]], device=DEVICE)
    rotation = Rotation(*torch.randn(2, tokens, rope).to(dtype).to(DEVICE))
    norm = LatentNorm(torch.rand(rank).to(dtype).to(DEVICE), 1e-6)
    arguments = (kv_a, pages[:, 1], rotation, SlotMapping(*places), norm)
    hold(LATENT_KV, Backend.TRITON, *arguments)
    q = torch.randn(tokens, 19 * 20).to(dtype).to(DEVICE)
    hold(ROTARY_PAIRS, Backend.TRITON, q.view(tokens, 19, 20), rotation)
