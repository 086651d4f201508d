"""Products with fp8 weights on a CPU, and what their wrapper refuses."""

import pytest
import torch

from tandem.kernels.errors import BadTensor
from tandem.kernels.fp8_gemm import BLOCK, fp8_linear
from tandem.kernels.fp8_gemm.reference import STRIP


def operands(rows, outputs, inner, *, dtype=torch.float32):
    """x, codes and scales, the same every time."""
    torch.manual_seed(7)
    codes = torch.randn(outputs, inner).clamp(-4, 4).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-outputs // BLOCK), -(-inner // BLOCK)) / inner**0.5
    return torch.randn(rows, inner).to(dtype), codes, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), [(3, 2 * STRIP + 72, 200), (0, 128, 128), (1, 100, 300)]
)
def test_each_block_has_its_scale(rows, outputs, inner, dtype):
    """Element by element, over several strips and blocks that are cut short."""
    x, codes, scale = operands(rows, outputs, inner, dtype=dtype)
    across, along = (torch.arange(extent) // BLOCK for extent in codes.shape)
    weight = (codes.double() * scale.double()[across][:, along]).to(dtype).double()
    bias = torch.randn(outputs).to(dtype)
    want = x.double() @ weight.T + bias
    got = fp8_linear(x, codes, scale, bias)
    assert got.dtype == dtype
    near = 0.03 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), want, atol=near, rtol=near)
    assert fp8_linear(x, codes, scale, out_dtype=torch.float32).dtype == torch.float32
    by_output = scale[:, 0].repeat_interleave(BLOCK)[:outputs]
    want = x.double() @ (codes.double() * by_output.double()[:, None]).to(dtype).double().T
    torch.testing.assert_close(fp8_linear(x, codes, by_output).double(), want, atol=near, rtol=near)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, w, s: (x, w.float(), s), "weight is torch.float32"),
        (lambda x, w, s: (x, w, s[:1]), "scale has shape"),
        (lambda x, w, s: (x, w, s.double()), "scale is torch.float64"),
        (lambda x, w, s: (x.double(), w, s), "x is torch.float64"),
        (lambda x, w, s: (x[:, :5], w, s), "weight has shape"),
    ],
)
def test_other_tensors_are_refused(change, named):
    """Types and shapes, by the tensor's name."""
    with pytest.raises(BadTensor, match=named):
        fp8_linear(*change(*operands(2, 200, 200)))
