"""Products with fp8 weights in Triton against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, HOPPER, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.activation import silu_and_mul
from tandem.kernels.fp8_gemm import (
    BLOCK,
    FP8_FEED_FORWARD,
    FP8_LINEAR,
    FP8_LINEAR_ADD,
    FP8_NORM_LINEAR,
    FP8Weight,
)
from tandem.kernels.fp8_gemm.reference import rounded
from tandem.kernels.norm import rms_norm
from tandem.kernels.testing import TOLERANCE

pytestmark = NEEDS
SUMMED = (2e-5, 2e-4)
"""Of float32 results: thousands of products in another order."""


ROUNDED = 0.01 if HOPPER else 0.1
"""Of products of rounded rows; the interpreter truncates where a GPU rounds."""


def drawn(rows, outputs, inner, dtype, *, channel=False):
    """x, codes and scales, the same every time."""
    draws = torch.manual_seed(rows + inner)
    x = torch.randn(rows, 2 * inner, generator=draws)[:, :inner].to(dtype)
    codes = torch.randn(outputs, inner, generator=draws).clamp(-4, 4).to(torch.float8_e4m3fn)
    shape = (outputs,) if channel else (-(-outputs // BLOCK), -(-inner // BLOCK))
    scale = (torch.rand(*shape, generator=draws) + 0.2) / inner**0.5
    return x.to(DEVICE), codes.to(DEVICE), scale.to(DEVICE)


def rounds(x, codes):
    """Whether rows of x are rounded to fp8, too."""
    whole = all(extent % BLOCK == 0 for extent in codes.shape)
    return x.dtype is not torch.float32 and whole and (HOPPER or DEVICE == "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"),
    [
        (0, 128, 128),
        (1, 128, 128),
        (5, size(4096, 200), size(4096, 300)),
        (17, 96, 384),
        (20, size(2048, 272), size(8192, 640)),
        (33, size(4096, 128), size(12288, 256)),
        (50, size(4096, 144), size(1024, 160)),
        (64, size(1024, 128), size(2944, 128)),
        (size(300, 70), size(1024, 140), size(1536, 160)),
        (size(2100, 70), size(1024, 128), size(1536, 256)),
    ],
)
@pytest.mark.parametrize(("with_bias", "channel"), [(False, False), (True, False), (True, True)])
def test_products_with_scales_agree_with_the_reference(
    rows, outputs, inner, dtype, with_bias, channel
):
    """Any number of rows, blocks cut short on either side, sums in float32 or in x's type.

    Held to float32 throughout: the reference rounds weights and sums to x's type, the kernel does
    not round what it adds up.
    """
    x, codes, scale = drawn(rows, outputs, inner, dtype, channel=channel)
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if with_bias else None
    exact = None if bias is None else bias.float()
    kept = rounded(x, by_row=channel) if rounds(x, codes) and rows else x.float()
    wanted = FP8_LINEAR.load(Backend.TORCH)(kept, codes, scale, exact, torch.float32)
    for out_dtype in (dtype, torch.float32):
        got = FP8_LINEAR.load(Backend.TRITON)(x, codes, scale, bias, out_dtype)
        assert got.dtype is out_dtype
        if rows and rounds(x, codes):
            # Another order of operations rounds a number between two codes to the other one.
            assert (got.float() - wanted).norm() < 0.01 * wanted.norm()
            continue
        close = SUMMED if out_dtype is torch.float32 else TOLERANCE[out_dtype]
        torch.testing.assert_close(got.float(), wanted, rtol=close[0], atol=close[1])


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize(
    ("rows", "stream"),
    [
        (1, torch.float32),
        (size(70, 5), torch.float16),
        *([(20, torch.float16), (64, torch.float32)] if GPU else []),
    ],
)
def test_a_norm_before_and_a_gate_after_are_as_separate_ones(rows, stream, channel):
    """The norm is rounded to its type before its numbers are rounded to fp8."""
    x, codes, scale = drawn(rows, 512, size(1280, 384), torch.float16, channel=channel)
    x = x.to(stream)
    gain = torch.rand(x.shape[1], device=DEVICE).half() + 0.5
    normed = rounded(rms_norm(x, gain, 1e-5, backend=Backend.TORCH), by_row=channel)
    wanted = FP8_LINEAR.load(Backend.TORCH)(normed, codes, scale, None, torch.float32)
    got = FP8_NORM_LINEAR.load(Backend.TRITON)(x, gain, 1e-5, codes, scale, None)
    assert (got.float() - wanted).norm() < ROUNDED * wanted.norm()
    gate_up, (_, codes, scale) = FP8Weight(codes, scale), drawn(1, 384, 256, torch.half)
    inner = silu_and_mul(wanted.half(), backend=Backend.TORCH)
    residual = torch.randn(rows, 384, device=DEVICE).to(stream)
    wanted = FP8_LINEAR.load(Backend.TORCH)(rounded(inner), codes, scale, None, torch.float32)
    FP8_FEED_FORWARD.load(Backend.TRITON)(
        x, gain, 1e-5, gate_up, FP8Weight(codes, scale), got := residual.clone()
    )
    assert (got.float() - residual - wanted).norm() < 2 * ROUNDED * wanted.norm()


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), [(3, 256, 384), (40, 144, 320), (70, 128, 256), (20, 128, 1280)]
)
def test_rows_that_are_fp8_already_are_multiplied_as_they_are(rows, outputs, inner, channel):
    """Each block of x has the largest number of its type, so that rounding changes nothing."""
    _, codes, scale = drawn(rows, outputs, inner, torch.float16, channel=channel)
    scale = scale / 448
    draws = torch.manual_seed(rows)
    x = torch.randint(-8, 9, (rows, inner), generator=draws).half() * 2
    x[:, ::BLOCK] = 448.0
    x = x.to(DEVICE)
    torch.testing.assert_close(rounded(x, by_row=channel), x.float(), rtol=0, atol=0)
    wanted = FP8_LINEAR.load(Backend.TORCH)(x.float(), codes, scale, None, torch.float32)
    got = FP8_LINEAR.load(Backend.TRITON)(x, codes, scale, None, torch.float32)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    for kind in (torch.float32, torch.float16):
        residual = torch.randn(rows, outputs + 8, device=DEVICE).to(kind)[:, :outputs]
        sums = residual.float() + wanted
        FP8_LINEAR_ADD.load(Backend.TRITON)(x, codes, scale, residual)
        near = TOLERANCE[kind] if kind is torch.float16 else (1e-4, 1e-4)
        torch.testing.assert_close(residual.float(), sums, rtol=near[0], atol=near[1])
