"""Products with fp8 weights in Triton against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.fp8_gemm import BLOCK, FP8_LINEAR
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
    wanted = FP8_LINEAR.load(Backend.TORCH)(x.float(), codes, scale, exact, torch.float32)
    for out_dtype in (dtype, torch.float32):
        got = FP8_LINEAR.load(Backend.TRITON)(x, codes, scale, bias, out_dtype)
        assert got.dtype is out_dtype
        close = SUMMED if out_dtype is torch.float32 else TOLERANCE[out_dtype]
        torch.testing.assert_close(got.float(), wanted, rtol=close[0], atol=close[1])
