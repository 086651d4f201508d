"""Products of int8 weights and rounded rows on a CPU, and what their wrapper refuses."""

import pytest
import torch

from tandem.kernels.errors import BadTensor
from tandem.kernels.int8_gemm import int8_linear
from tandem.kernels.int8_gemm.reference import EXACT, STRIP, rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(3, STRIP + 8, 2 * EXACT + 9), (0, 8, 8)])
def test_sums_of_rounded_rows_are_exact(rows, outputs, inner, dtype):
    """Over several strips and parts, with the largest codes."""
    torch.manual_seed(3)
    x = torch.randn(rows, inner).sign().mul_(torch.rand(rows, inner) * 0.1 + 0.9).to(dtype)
    weight = torch.randint(-128, 128, (outputs, inner), dtype=torch.int8)
    scale, bias = torch.rand(outputs) / inner, torch.randn(outputs).to(dtype)
    codes, of_rows = rounded(x)
    assert codes.abs().max() == 127 if rows else True
    sums = codes.long() @ weight.long().t()
    want = sums.float() * of_rows[:, None] * scale + bias.float()
    assert torch.equal(int8_linear(x, weight, scale, bias, out_dtype=torch.float32), want)
    assert torch.equal(int8_linear(x, weight, scale, bias), want.to(dtype))


def test_ties_are_rounded_to_even_and_zeros_stay():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -0.5], [0.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scale = rounded(x)
    assert codes.tolist() == [[127, 0, 2, -2, 0], [0, 0, 0, 0, 0]]
    assert scale[0] == 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, w, s: (x, w.float(), s), "weight is torch.float32"),
        (lambda x, w, s: (x, w, s[:1]), "scale has shape"),
        (lambda x, w, s: (x, w, s.double()), "scale is torch.float64"),
        (lambda x, w, s: (x[:, :5], w, s), "weight has shape"),
    ],
)
def test_other_tensors_are_refused(change, named):
    """Types and shapes, by the tensor's name."""
    operands = (torch.ones(2, 16), torch.ones(4, 16, dtype=torch.int8), torch.ones(4))
    with pytest.raises(BadTensor, match=named):
        int8_linear(*change(*operands))
