"""Norms, activation, and the op between projection and attention."""

import pytest
import torch
from torch.nn.functional import silu

from tandem.kernels import BadTensor
from tandem.kernels.activation import silu_and_mul
from tandem.kernels.gemm import linear_add, norm_linear
from tandem.kernels.norm import rms_norm
from tandem.kernels.rotary_kv import QKNorm, Rotation, SlotMapping, rotary_kv, rotary_q


def normed(x, weight, eps):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_rms_norm_is_its_formula(rows):
    """Rows are normed one by one."""
    x, weight = torch.randn(rows, 48), torch.randn(48)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stream_in_float32_keeps_its_sums(dtype):
    """The stream is not rounded, what is normed from it has the type of the weight."""
    x, weight = torch.randn(5, 48).to(dtype), torch.randn(48).to(dtype)
    stream = torch.randn(5, 48)
    out = rms_norm(stream, weight, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out, normed(stream, weight, 1e-5).to(dtype))
    product = torch.randn(7, 48).to(dtype)
    assert norm_linear(stream, weight, 1e-5, product).dtype == dtype
    wide = torch.randn(5, 7)
    want = wide + x.float() @ product.float().t()
    assert linear_add(x, product, wide) is wide
    torch.testing.assert_close(wide, want, rtol=0, atol=0.1)


def test_norms_refuse_what_does_not_fit():
    """Weights of another width or type are named."""
    with pytest.raises(BadTensor, match="weight has shape"):
        rms_norm(torch.randn(2, 8), torch.ones(4), 1e-5)
    with pytest.raises(BadTensor, match="x is"):
        rms_norm(torch.randn(2, 8).half(), torch.ones(8), 1e-5)


def test_silu_and_mul_takes_the_gate_first():
    """silu(first half) * second half, and the input is left alone."""
    x = torch.randn(7, 32)
    kept = x.clone()
    torch.testing.assert_close(silu_and_mul(x), silu(kept[:, :16]) * kept[:, 16:])
    assert torch.equal(x, kept)
    with pytest.raises(BadTensor, match="even"):
        silu_and_mul(torch.randn(7, 33))


def rotation_of(positions, dim, theta=10000.0):
    """Angles in the layout of the op."""
    angles = positions[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    return Rotation(
        cos=torch.cat((angles.cos(), angles.cos()), -1),
        sin=torch.cat((-angles.sin(), angles.sin()), -1),
    )


def rotated(x, positions, theta=10000.0):
    """Pairs (i, i + dim/2) turned by their angle as complex numbers."""
    dim = x.shape[-1]
    angles = positions[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [6, 0])
def test_rotary_kv_rotates_and_writes(tokens, with_norm, block_size, heads):
    """q, if any, comes back rotated; K (rotated) and V are in their slots and nowhere else."""
    kv_heads, dim = 2, 16
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim)
    kv_cache = torch.zeros(5, 3, 2, kv_heads, block_size, dim)
    places = torch.randperm(5 * block_size)[:tokens]
    slot_mapping = SlotMapping(places // block_size, places % block_size)
    positions = torch.randint(0, 1000, (tokens,)).float()
    q, k, v = (t.clone() for t in qkv.split([heads, kv_heads, kv_heads], 1))
    norm = None
    if with_norm:
        norm = QKNorm(torch.randn(dim), torch.randn(dim), 1e-6)
        q = normed(q, norm.q_weight, 1e-6).float()
        k = normed(k, norm.k_weight, 1e-6).float()
    got = rotary_kv(qkv, kv_cache[:, 1], rotation_of(positions, dim), slot_mapping, norm)
    torch.testing.assert_close(got, rotated(q, positions), atol=2e-5, rtol=1e-4)
    want = torch.zeros_like(kv_cache)
    want[slot_mapping.blocks, 1, 0, :, slot_mapping.offsets] = rotated(k, positions)
    want[slot_mapping.blocks, 1, 1, :, slot_mapping.offsets] = v
    torch.testing.assert_close(kv_cache, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotary_q_turns_queries_by_their_angles(tokens, with_norm):
    """Queries alone are normed and rotated in place."""
    heads, dim = 6, 16
    q, norm = torch.randn(tokens, heads, dim), None
    want, positions = q.clone(), torch.randint(0, 1000, (tokens,)).float()
    if with_norm:
        norm = QKNorm(torch.randn(dim), torch.randn(dim), 1e-6)
        want = normed(want, norm.q_weight, 1e-6).float()
    assert rotary_q(q, rotation_of(positions, dim), norm) is q
    torch.testing.assert_close(q, rotated(want, positions), atol=2e-5, rtol=1e-4)


def test_rotary_kv_refuses_what_does_not_fit():
    """Strided rows, missing heads and slots of another length are named."""
    kv = torch.zeros(2, 2, 2, 16, 8)
    rotation = Rotation(torch.ones(3, 8), torch.zeros(3, 8))
    slot_mapping = SlotMapping(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    with pytest.raises(BadTensor, match="dense rows"):
        rotary_kv(torch.randn(3, 3, 8), kv, rotation, slot_mapping)
    with pytest.raises(BadTensor, match="dense rows"):
        rotary_q(torch.randn(3, 4, 8)[:, :2], rotation)
    with pytest.raises(BadTensor, match="sin has shape"):
        rotary_q(torch.randn(3, 4, 8), rotation._replace(sin=torch.zeros(2, 8)))
    with pytest.raises(BadTensor, match="cos has shape"):
        rotary_kv(torch.randn(2, 6, 8), kv, rotation, slot_mapping)
    with pytest.raises(BadTensor, match=r"slot_mapping\.offsets"):
        rotary_kv(
            torch.randn(3, 6, 8), kv, rotation, slot_mapping._replace(offsets=torch.arange(2))
        )
    with pytest.raises(BadTensor, match=r"slot_mapping\.blocks is"):
        rotary_kv(torch.randn(3, 6, 8), kv, rotation, slot_mapping._replace(blocks=torch.zeros(3)))
