"""Products with codes of groups in Triton against plain torch."""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, NEEDS, size
from tests.kernels.grouped_weights import drawn_weight

from tandem.kernels import Backend
from tandem.kernels.grouped_gemm import GROUPED_LINEAR, GROUPED_LINEAR_ADD
from tandem.kernels.grouped_gemm.reference import decoded
from tandem.kernels.grouped_gemm.triton import MANY_ROWS, Form, multiply
from tandem.kernels.testing import TOLERANCE

pytestmark = NEEDS
TYPES = [*DTYPES, torch.float16, torch.float32]
SHAPES = [
    (0, 128, 128),
    (1, size(4096, 200), size(4096, 384)),
    (5, 96, size(2048, 256)),
    (size(100, 70), size(1024, 136), size(1536, 256)),
]
CASES = [
    (*shape, TYPES[(i + j) % len(TYPES)], *form)
    for i, shape in enumerate(SHAPES)
    for j, form in enumerate([(4, 32, False), (4, 64, True), (4, 128, False), (4, 0, True)])
]
CASES += [
    (7, 72, 160, TYPES[0], 4, 32, True),
    (20, 72, 160, TYPES[0], 8, 32, False),
    (3, 72, 160, torch.float16, 8, 0, True),
]


def on_device(weight):
    """The weight with its tensors on the device of these tests."""
    zeros = None if weight.zeros is None else weight.zeros.to(DEVICE)
    return weight._replace(
        codes=weight.codes.to(DEVICE), scale=weight.scale.to(DEVICE), zeros=zeros
    )


def held_to(x, weight):
    """The product in float64 of x and the exact values."""
    return x.double() @ decoded(weight, x.shape[1]).double().t()


@pytest.mark.parametrize(("rows", "outputs", "inner", "dtype", "bits", "group", "symmetric"), CASES)
def test_products_agree_with_the_exact_values(rows, outputs, inner, dtype, bits, group, symmetric):
    """Blocks cut short, zero points, a bias, and a residual in float32 or in x's type."""
    weight = drawn_weight(outputs, inner, bits=bits, group=group, symmetric=symmetric)
    weight = on_device(weight._replace(scale=weight.scale.to(dtype)))
    drawn = torch.manual_seed(rows + inner)
    x = torch.randn(rows, 2 * inner, generator=drawn)[:, :inner].to(dtype).to(DEVICE)
    bias = torch.randn(outputs, generator=drawn).to(dtype).to(DEVICE)
    want = held_to(x, weight)
    got = GROUPED_LINEAR.load(Backend.TRITON)(x, weight, bias, torch.float32)
    torch.testing.assert_close(got.double(), want + bias.double(), rtol=2e-4, atol=2e-4)
    got = GROUPED_LINEAR.load(Backend.TRITON)(x, weight, None, dtype)
    near = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, rtol=near[0], atol=near[1])
    residual = torch.randn(rows, outputs + 8, generator=drawn).to(DEVICE)[:, :outputs]
    sums = residual.double() + want
    GROUPED_LINEAR_ADD.load(Backend.TRITON)(x, weight, residual)
    torch.testing.assert_close(residual.double(), sums, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 32])
def test_many_rows_multiply_the_decoded_weight(bits, group):
    """Values are rounded to x's type once, and outputs of a merged weight are cut out."""
    weight = drawn_weight(size(512, 72), 160, bits=bits, group=group, symmetric=False)
    weight = on_device(weight).part(slice(8, None))
    dtype = DTYPES[0]
    x = torch.randn(MANY_ROWS + 3, 160, device=DEVICE).to(dtype)
    got = GROUPED_LINEAR.load(Backend.TRITON)(x, weight, None, dtype)
    want = GROUPED_LINEAR.load(Backend.TORCH)(x, weight, None, dtype)
    near = TOLERANCE[dtype]
    torch.testing.assert_close(got, want, rtol=near[0], atol=near[1])


@pytest.mark.parametrize("form", [Form(16, 64, 1, 2, 4), Form(32, 128, 4, 3, 4)])
def test_forms_change_no_result(form):
    weight = drawn_weight(200, 320, bits=4, group=64, symmetric=False)
    weight = on_device(weight)
    x = torch.randn(20, 320, device=DEVICE).to(DTYPES[0])
    out = torch.empty(20, 200, device=DEVICE)
    multiply(x, weight, None, None, out, form)
    torch.testing.assert_close(out.double(), held_to(x, weight), rtol=2e-4, atol=2e-4)
