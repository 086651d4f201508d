"""Norms, activation, rotation with KV write and block moves in Triton against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.activation import GELU_TANH_AND_MUL, SILU_AND_MUL
from tandem.kernels.blocks import COPY, PACK, UNPACK, digest, pack, unpack
from tandem.kernels.norm import ADD_LAYER_NORM, RMS_NORM
from tandem.kernels.rotary_kv import ROTARY_KV, ROTARY_Q, QKNorm, Rotation, SlotMapping
from tandem.kernels.testing import hold

pytestmark = NEEDS


def random(*shape, dtype):
    return torch.randn(*shape, generator=torch.manual_seed(3)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(0, 64), (1, 96), (5, size(4096, 128)), (33, 40)])
def test_norms_agree_with_the_reference(rows, dim, dtype):
    """Any number of rows and any width, rows with a stride."""
    wide = random(rows, 2 * dim, dtype=dtype)
    weight = random(dim, dtype=dtype)
    hold(RMS_NORM, Backend.TRITON, wide[:, :dim], weight, 1e-6)
    hold(RMS_NORM, Backend.TRITON, random(rows, 3, dim, dtype=dtype), weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(0, 64), (1, 96), (5, size(4096, 128)), (33, 40)])
def test_norms_of_sums_agree_with_the_reference(rows, dim, dtype):
    """Any number of rows and any width, rows with a stride, means that are far from zero."""
    wide, residual = random(rows, 2 * dim, dtype=dtype) + 3, random(rows, dim, dtype=dtype)
    gain, shift = random(dim, dtype=dtype), random(dim, dtype=dtype) - 1
    hold(ADD_LAYER_NORM, Backend.TRITON, wide[:, dim:], residual, gain, shift, 1e-12)
    hold(ADD_LAYER_NORM, Backend.TRITON, residual, wide[:, :dim], gain, shift, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(0, 8), (1, size(12288, 1500)), (7, 24)])
@pytest.mark.parametrize("op", [SILU_AND_MUL, GELU_TANH_AND_MUL], ids=lambda op: op.name)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_the_activations_agree_with_the_reference(op, rows, dim, dtype):
    """Rows dense or not, widths that fill no piece; gates whose exp is infinite give zero."""
    hold(op, Backend.TRITON, random(rows, 2 * dim, dtype=dtype) * 4)
    hold(op, Backend.TRITON, random(rows, 3 * dim, dtype=dtype)[:, dim:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (7, 1, 80), (0, 2, 16), (0, 5, 80)]
)
def test_rotation_and_kv_write_agree_with_the_reference(heads, kv_heads, dim, normed, dtype):
    """q (if any), k and v end where the reference puts them, and no other slot is touched."""
    tokens, blocks, page = 6, 5, 4
    qkv = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    kv_cache = random(blocks, 3, 2, kv_heads, page, dim, dtype=dtype)
    angles = torch.rand(tokens, dim, dtype=torch.float64) * 6
    rotation = Rotation(angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE))
    places = torch.randperm(blocks * page)[:tokens]
    slot_mapping = SlotMapping((places // page).to(DEVICE), (places % page).to(DEVICE))
    norm = QKNorm(random(dim, dtype=dtype), random(dim, dtype=dtype) + 1, 1e-6) if normed else None
    hold(ROTARY_KV, Backend.TRITON, qkv, kv_cache[:, 1], rotation, slot_mapping, norm, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(0, 4, 16), (1, 9, 64), (6, 7, 80), (3, 16, 128)]
)
def test_rotation_of_queries_alone_agrees_with_the_reference(tokens, heads, dim, normed, dtype):
    """Any number of queries, heads that fill no program, with and without the norm."""
    q = random(tokens, heads, dim, dtype=dtype)
    angles = torch.rand(tokens, dim, dtype=torch.float64) * 6
    rotation = Rotation(angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE))
    norm = QKNorm(random(dim, dtype=dtype), random(dim, dtype=dtype) + 1, 1e-6) if normed else None
    hold(ROTARY_Q, Backend.TRITON, q, rotation, norm)


@pytest.mark.parametrize("width", [24, 4096, size(1 << 20, 40_000), 37])
def test_block_moves_agree_with_the_reference(width):
    """Rows of words and rows of odd bytes go where the ids say, and other rows stay."""
    kv_cache = torch.randint(0, 256, (9, width), dtype=torch.uint8).to(DEVICE)
    ids = torch.tensor([7, 0, 3], device=DEVICE)
    rows = torch.randint(0, 256, (3, width), dtype=torch.uint8).to(DEVICE)
    hold(PACK, Backend.TRITON, kv_cache, ids, torch.zeros_like(rows))
    hold(UNPACK, Backend.TRITON, rows, ids, kv_cache)
    hold(COPY, Backend.TRITON, kv_cache, ids, torch.tensor([1, 8, 2], device=DEVICE))
    hold(PACK, Backend.TRITON, kv_cache, ids[:0], rows[:0])


@pytest.mark.parametrize("count", [0, 1, 7, 8, 8191, 8192, 8193, size(10_000_001, 50_001)])
def test_the_digest_is_the_same_on_every_backend(count):
    """Bit for bit the number that the torch backend gives on a CPU."""
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    want = digest(data, backend=Backend.TORCH)
    assert digest(data.to(DEVICE), backend=Backend.TRITON) == want


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_blocks_move_between_a_gpu_and_host_memory():
    """Slots of the hand-off may lie in host memory, with ids on the host."""
    kv_cache = torch.randint(0, 256, (6, 1024), dtype=torch.uint8)
    out, back = torch.zeros(2, 1024, dtype=torch.uint8), torch.zeros_like(kv_cache, device="cuda")
    ids = torch.tensor([4, 1])
    pack(kv_cache.cuda(), ids, out)
    unpack(out, ids, back)
    assert torch.equal(out, kv_cache[ids])
    assert torch.equal(back.cpu()[ids], kv_cache[ids])
    assert digest(back) == digest(back.cpu())
