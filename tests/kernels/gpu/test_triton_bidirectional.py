"""Attention of whole prompts against float64, on a GPU or, small, in Triton's interpreter.

Skipped where there is neither; tests/kernels/test_interpreted.py runs this file interpreted.
"""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, NEEDS

from tandem.kernels import Backend
from tandem.kernels.attention.bidirectional import bidirectional
from tandem.kernels.testing import TOLERANCE

pytestmark = NEEDS
LENGTHS = [1, 64, 512, 0, 65, 127, 300] if GPU else [1, 64, 0, 65, 20]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 48, 128] if GPU else [16, 12])
def test_each_sequence_sees_all_of_itself_and_nothing_else(dtype, dim):
    """Lengths around a tile's, an empty one, heads of any width, q, k and v cut of one product."""
    torch.manual_seed(dim)
    tokens, heads = sum(LENGTHS), 3
    made = torch.randn(tokens, 3, heads, dim).to(dtype)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    q, k, v = made.to(DEVICE).unbind(1)
    got = bidirectional(q, k, v, starts.to(DEVICE), max(LENGTHS), dim**-0.5, backend=Backend.TRITON)
    want = torch.empty(tokens, heads, dim, dtype=torch.float64)
    for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        a, b, c = made[start:stop].double().unbind(1)
        p = (torch.einsum("qhd,khd->hqk", a, b) * dim**-0.5).softmax(-1)
        want[start:stop] = torch.einsum("hqk,khd->qhd", p, c)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), want, rtol=rtol, atol=atol)
    assert got.is_contiguous()
