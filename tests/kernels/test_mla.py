"""Latent attention in plain torch, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.latent_cases import BATCHES, LatentCase, latent_case

from tandem.kernels.errors import BadTensor
from tandem.kernels.mla import (
    LatentNorm,
    latent_kv,
    mla_decode,
    mla_prefill,
    reference,
    rotary_pairs,
)
from tandem.kernels.rotary_kv import Rotation, SlotMapping


def angles(tokens: int, rope: int) -> Rotation:
    angle = torch.rand(tokens, rope // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    return Rotation(torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))


def turned(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return pairs of neighbours [tokens, .., rope] times e^(i angle), as complex numbers."""
    half = x.shape[-1] // 2
    turn = torch.complex(rotation.cos[:, :half], rotation.sin[:, half:])
    turn = turn.view(len(x), *[1] * (x.dim() - 2), half)
    pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


@pytest.mark.parametrize(("lengths", "queries"), BATCHES)
def test_absorbed_and_expanded_attention_are_equal(lengths: list[int], queries: list[int]) -> None:
    case = latent_case(lengths, queries)
    latent = mla_decode(*case.absorbed, case.kv, case.batch, case.scale)
    torch.testing.assert_close(latent.double(), case.latent_answer(), atol=1e-5, rtol=1e-5)
    expanded = mla_prefill(case.q, case.kv, case.kv_b, case.batch, case.scale)
    torch.testing.assert_close(expanded.double(), case.answer(), atol=1e-5, rtol=1e-5)


def test_parts_of_keys_and_queries_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    case = latent_case([50, 41], [33, 1])
    monkeypatch.setattr(reference, "EXPANDED", 7 * case.kv_b[:, :, 0].numel())
    monkeypatch.setattr(reference, "ELEMENTS", 4 * 3 * 50)
    found = mla_prefill(case.q, case.kv, case.kv_b, case.batch, case.scale)
    torch.testing.assert_close(found.double(), case.answer(), atol=1e-5, rtol=1e-5)
    latent = mla_decode(*case.absorbed, case.kv, case.batch, case.scale)
    torch.testing.assert_close(latent.double(), case.latent_answer(), atol=1e-5, rtol=1e-5)


def test_latents_are_normed_and_keys_rotated_in_pairs() -> None:
    torch.manual_seed(0)
    rank, rope, tokens = 24, 8, 5
    kv_a = torch.randn(tokens, 40)[:, 3 : 3 + rank + rope]
    before, pages = kv_a.clone(), torch.full((4, 3, 16, rank + rope), torch.nan)
    slots = SlotMapping(torch.tensor([3, 0, 2, 2, 1]), torch.tensor([15, 0, 7, 8, 4]))
    rotation, norm = angles(tokens, rope), LatentNorm(torch.rand(rank), 1e-6)
    latent_kv(kv_a, pages[:, 1], rotation, slots, norm)
    rows = pages[slots.blocks, 1, slots.offsets]
    x = before[:, :rank].double()
    wanted = x * (x.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight
    torch.testing.assert_close(rows[:, :rank].double(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rows[:, rank:], turned(before[:, rank:], rotation))
    assert torch.equal(kv_a, before)
    assert int(pages.isfinite().sum()) == tokens * (rank + rope)


def test_the_last_numbers_of_each_head_are_rotated() -> None:
    wide = torch.randn(5, 70)
    q, rotation = wide[:, :60].view(5, 3, 20), angles(5, 8)
    before = wide.clone()
    heads = before[:, :60].view(5, 3, 20)
    assert rotary_pairs(q, rotation) is q
    torch.testing.assert_close(q[..., 12:], turned(heads[..., 12:], rotation))
    assert torch.equal(q[..., :12], heads[..., :12])
    assert torch.equal(wide[:, 60:], before[:, 60:])


def refused(case: LatentCase, **changes: Any) -> str:
    q, kv, kv_b, batch, scale = case._replace(**changes)
    with pytest.raises(BadTensor) as found:
        mla_prefill(q, kv, kv_b, batch, scale)
    return str(found.value)


def test_tensors_that_do_not_fit_are_named() -> None:
    case = latent_case([20], [3])
    codes = case.kv.to(torch.float8_e4m3fn)
    assert "kv is torch.float8_e4m3fn" in refused(case, kv=codes)
    assert "kv_b has shape" in refused(case, kv_b=case.kv_b[:2])
    assert "are not rotated" in refused(case, q=case.q[..., :8].contiguous())
    assert "kv has strides" in refused(case, kv=case.kv.transpose(0, 1))
    with pytest.raises(BadTensor, match="kv has shape"):
        mla_decode(case.q, case.q[..., 12:], case.kv, case.batch, case.scale)
    with pytest.raises(BadTensor, match="7 numbers to rotate"):
        rotary_pairs(case.q, Rotation(torch.ones(3, 7), torch.ones(3, 7)))
