"""Products with fp8 weights in Triton against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, HOPPER, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.fp8_gemm import BLOCK, FP8_LINEAR, FP8_LINEAR_ADD
from tandem.kernels.fp8_gemm.reference import rounded
from tandem.kernels.testing import TOLERANCE

pytestmark = NEEDS
SUMMED = (2e-5, 2e-4)
"""Of float32 results: thousands of products in another order."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"),
    [
        (0, 128, 128),
        (1, 128, 128),
        (5, size(4096, 200), size(4096, 300)),
        (17, 96, 384),
        (20, size(2048, 272), size(8192, 640)),
        (50, size(4096, 144), size(1024, 160)),
        (size(300, 70), size(1024, 140), size(1536, 160)),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_with_blocks_agree_with_the_reference(rows, outputs, inner, dtype, with_bias):
    """Any number of rows, blocks cut short on either side, sums in float32 or in x's type.

    Held to float32 throughout: the reference rounds weights and sums to x's type, the kernel does
    not round what it adds up.
    """
    drawn = torch.manual_seed(rows + inner)
    x = torch.randn(rows, 2 * inner, generator=drawn)[:, :inner].to(dtype).to(DEVICE)
    codes = torch.randn(outputs, inner, generator=drawn).clamp(-4, 4).to(torch.float8_e4m3fn)
    blocks = (-(-outputs // BLOCK), -(-inner // BLOCK))
    scale = torch.rand(*blocks, generator=drawn) / inner**0.5
    bias = torch.randn(outputs, generator=drawn).to(dtype).to(DEVICE) if with_bias else None
    codes, scale = codes.to(DEVICE), scale.to(DEVICE)
    exact = None if bias is None else bias.float()
    kept = rounded(x) if dtype is not torch.float32 and HOPPER else x.float()
    wanted = FP8_LINEAR.load(Backend.TORCH)(kept, codes, scale, exact, torch.float32)
    for out_dtype in (dtype, torch.float32):
        got = FP8_LINEAR.load(Backend.TRITON)(x, codes, scale, bias, out_dtype)
        assert got.dtype is out_dtype
        if kept.shape[0] and dtype is not torch.float32 and HOPPER:
            # Another order of operations rounds a number between two codes to the other one.
            assert (got.float() - wanted).norm() < 0.01 * wanted.norm()
            continue
        close = SUMMED if out_dtype is torch.float32 else TOLERANCE[out_dtype]
        torch.testing.assert_close(got.float(), wanted, rtol=close[0], atol=close[1])


@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), [(3, 256, 384), (40, 144, 320), (70, 144, 256), (20, 136, 1296)]
)
def test_rows_that_are_fp8_already_are_multiplied_as_they_are(rows, outputs, inner):
    """Each block of x has the largest number of its type, so that rounding changes nothing."""
    drawn = torch.manual_seed(rows)
    x = torch.randint(-8, 9, (rows, inner), generator=drawn).half() * 2
    x[:, ::BLOCK] = 448.0
    codes = torch.randn(outputs, inner, generator=drawn).clamp(-4, 4).to(torch.float8_e4m3fn)
    blocks = (-(-outputs // BLOCK), -(-inner // BLOCK))
    scale = torch.rand(*blocks, generator=drawn) / (448 * inner**0.5)
    x, codes, scale = x.to(DEVICE), codes.to(DEVICE), scale.to(DEVICE)
    torch.testing.assert_close(rounded(x), x.float(), rtol=0, atol=0)
    wanted = FP8_LINEAR.load(Backend.TORCH)(x.float(), codes, scale, None, torch.float32)
    got = FP8_LINEAR.load(Backend.TRITON)(x, codes, scale, None, torch.float32)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    for kind in (torch.float32, torch.float16):
        residual = torch.randn(rows, outputs + 8, device=DEVICE).to(kind)[:, :outputs]
        sums = residual.float() + wanted
        FP8_LINEAR_ADD.load(Backend.TRITON)(x, codes, scale, residual)
        near = TOLERANCE[kind] if kind is torch.float16 else (1e-4, 1e-4)
        torch.testing.assert_close(residual.float(), sums, rtol=near[0], atol=near[1])
