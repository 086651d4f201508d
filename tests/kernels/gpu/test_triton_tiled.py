"""Products with tiles of codes in Triton and Gluon against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, GPU, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.tiled_gemm import TILED_LINEAR, TILED_LINEAR_ADD, tiled
from tandem.kernels.tiled_gemm.tiles import values_of
from tandem.kernels.tiled_gemm.triton import decoded

pytestmark = NEEDS


def drawn(outputs, inner, group, dtype, *, symmetric=False):
    """Codes, scales and zero points, the same every time."""
    draws = torch.manual_seed(inner + group)
    codes = torch.randint(0, 16, (outputs, inner), generator=draws, dtype=torch.uint8)
    scale = (torch.rand(inner // group, outputs, generator=draws) / inner**0.5 + 1e-3).to(dtype)
    zeros = torch.randint(0, 16, scale.shape, generator=draws, dtype=torch.uint8)
    return codes.to(DEVICE), scale.to(DEVICE), None if symmetric else zeros.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 512])
def test_tiles_hold_each_code_at_its_input(group, symmetric, dtype):
    """The reference and the kernel that decodes agree with codes, zero points and scales."""
    codes, scale, zeros = drawn(192, 512, group, dtype, symmetric=symmetric)
    size_of = 512 // len(scale)
    each = scale.float().repeat_interleave(size_of, 0).T
    shifted = codes.float() - (
        8 if zeros is None else zeros.float().repeat_interleave(size_of, 0).T
    )
    weight = tiled(codes, scale, zeros)
    assert torch.equal(values_of(weight, slice(None)), (shifted * each).to(dtype))
    truncated = 0.0 if GPU or dtype is torch.float16 else 2**-7  # by the interpreter
    torch.testing.assert_close(decoded(weight), (shifted * each).to(dtype), rtol=truncated, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inner", "group"),
    [
        (0, 64, 128, 128),
        (1, 128, 1024, 128),
        (3, size(4096, 64), size(12288, 256), 64),
        (20, size(6144, 64), size(4096, 256), 32),
        (33, 64, 896, 896),
        (64, size(4096, 64), size(4096, 128), 128),
        (size(150, 70), size(1024, 64), size(2048, 128), 128),
        (size(300, 5), size(1024, 64), size(2048, 256), 128),
    ],
)
def test_products_with_tiles_agree_with_the_reference(rows, outputs, inner, group, dtype):
    """Any number of rows, with bias and with a residual."""
    weight = tiled(*drawn(outputs, inner, group, dtype))
    x = torch.randn(rows, inner + 8, device=DEVICE).to(dtype)[:, :inner]
    bias = torch.randn(outputs, device=DEVICE).to(dtype)
    wanted = TILED_LINEAR.load(Backend.TORCH)(x, weight, bias, torch.float32)
    near = 0.01 * wanted.norm()
    for out_dtype in (dtype, torch.float32):
        got = TILED_LINEAR.load(Backend.TRITON)(x, weight, bias, out_dtype)
        assert got.dtype is out_dtype
        assert (got.float() - wanted).norm() <= near
    residual = torch.randn(rows, outputs + 8, device=DEVICE)[:, :outputs]
    sums = residual + wanted - bias
    TILED_LINEAR_ADD.load(Backend.TRITON)(x, weight, residual)
    assert (residual - sums).norm() <= (1e-3 if GPU else 0.01) * sums.norm()
