"""Products of int8 weights and rounded rows in Triton against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.int8_gemm import INT8_LINEAR
from tandem.kernels.int8_gemm.reference import rounded
from tandem.kernels.int8_gemm.triton import rounded as rounded_in_triton

pytestmark = NEEDS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"),
    [
        (0, 128, 128),
        (1, size(4096, 200), size(4096, 300)),
        (20, size(2048, 272), size(8192, 640)),
        (70, 144, 160),
        (size(300, 66), 141, 160),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_reference(rows, outputs, inner, dtype, with_bias):
    """Sums are exact, so only the last roundings may differ."""
    drawn = torch.manual_seed(rows + inner)
    x = torch.randn(rows, 2 * inner, generator=drawn)[:, :inner].to(dtype).to(DEVICE)
    weight = torch.randint(-128, 128, (outputs, inner), generator=drawn, dtype=torch.int8)
    weight = weight.to(DEVICE)
    scale = (torch.rand(outputs, generator=drawn) / inner).to(DEVICE)
    bias = torch.randn(outputs, generator=drawn).to(dtype).to(DEVICE) if with_bias else None
    for got, want in zip(rounded_in_triton(x), rounded(x), strict=True) if rows else ():
        assert torch.equal(got, want)
    want = INT8_LINEAR.load(Backend.TORCH)(x, weight, scale, bias, torch.float32)
    got = INT8_LINEAR.load(Backend.TRITON)(x, weight, scale, bias, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert INT8_LINEAR.load(Backend.TRITON)(x, weight, scale, bias, dtype).dtype is dtype
