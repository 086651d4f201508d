"""Products with codes of groups on a CPU, their layout, and what their wrapper refuses."""

import pytest
import torch
from tests.kernels.grouped_weights import drawn_weight

from tandem.kernels.errors import BadTensor
from tandem.kernels.grouped_gemm import grouped_linear, grouped_linear_add
from tandem.kernels.grouped_gemm.packing import BLOCK, HALF, pack, unpack
from tandem.kernels.grouped_gemm.reference import STRIP


def test_low_bits_have_the_first_half_of_a_block():
    codes = torch.randint(0, 16, (3, 300), dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (3, 3 * HALF)
    assert torch.equal(packed[:, 0] & 15, codes[:, 0])
    assert torch.equal(packed[:, HALF] >> 4, codes[:, BLOCK + HALF])
    assert torch.equal(unpack(packed, 300), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group", "inner"), [(4, 32, 160), (4, 0, 200), (8, 128, 256)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_each_group_has_its_scale_and_zero_point(bits, group, inner, symmetric, dtype):
    """Element by element, over several strips; x is gathered by the weight's order."""
    outputs = STRIP + 72
    weight = drawn_weight(outputs, inner, bits=bits, group=group, symmetric=symmetric)
    codes = weight.codes if bits == 8 else unpack(weight.codes, inner)
    number = torch.arange(inner) // (group or inner)
    zeros = 1 << (bits - 1) if weight.zeros is None else weight.zeros.double()[number].t()
    values = (codes.double() - zeros) * weight.scale.double()[number].t()
    order = torch.randperm(inner)
    x, bias = torch.randn(5, inner).to(dtype), torch.randn(outputs).to(dtype)
    want = x.double()[:, order] @ values.t()
    got = grouped_linear(x, weight._replace(order=order.int()), bias)
    assert got.dtype == dtype
    near = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), want + bias, atol=near, rtol=near)
    residual = torch.zeros(5, outputs)
    grouped_linear_add(x, weight._replace(order=order.int()), residual)
    torch.testing.assert_close(residual.double(), want, atol=near, rtol=near)
    part = grouped_linear(x, weight.part(slice(70, 90)), out_dtype=torch.float32)
    whole = grouped_linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(part, whole[:, 70:90], atol=near, rtol=near)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"codes": torch.zeros(8, 60, dtype=torch.uint8)}, "codes has shape"),
        ({"codes": torch.zeros(8, 64)}, "codes is torch.float32"),
        ({"scale": torch.ones(3, 8)}, "3 groups of 128 inputs"),
        ({"scale": torch.ones(1, 8, dtype=torch.float16)}, "scale is torch.float16"),
        ({"scale": torch.ones(8, 1).t()[:, :7]}, "scale has shape"),
        ({"zeros": torch.ones(2, 8, dtype=torch.uint8)}, "zeros has shape"),
    ],
)
def test_other_tensors_are_refused(change, named):
    """Types and shapes, by the tensor's name."""
    weight = drawn_weight(8, 128, bits=4, group=0, symmetric=True)
    with pytest.raises(BadTensor, match=named):
        grouped_linear(torch.ones(2, 128), weight._replace(**change))
