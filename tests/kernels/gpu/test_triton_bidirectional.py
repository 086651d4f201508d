"""Attention of whole prompts against float64, on a GPU or, small, in Triton's interpreter.

Skipped where there is neither; tests/kernels/test_interpreted.py runs this file interpreted.
"""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, NEEDS

from tandem.kernels import Backend
from tandem.kernels.attention.bidirectional import BIDIRECTIONAL, WholePrompts, bidirectional
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
    prompts = WholePrompts(starts.to(DEVICE), max(LENGTHS))
    got = bidirectional(q, k, v, prompts, dim**-0.5, backend=Backend.TRITON)
    want = torch.empty(tokens, heads, dim, dtype=torch.float64)
    for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        a, b, c = made[start:stop].double().unbind(1)
        p = (torch.einsum("qhd,khd->hqk", a, b) * dim**-0.5).softmax(-1)
        want[start:stop] = torch.einsum("hqk,khd->qhd", p, c)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), want, rtol=rtol, atol=atol)
    assert got.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_room_for_more_and_longer_sequences_changes_nothing(dtype):
    """As in a CUDA graph: empty sequences behind a step's own, tokens that belong to none, and a
    bound of the lengths that is far from them."""
    torch.manual_seed(0)
    lengths, spare = [33, 0, 65, 1], 29
    tokens = sum(lengths) + spare
    made = torch.randn(tokens, 3, 2, 16).to(dtype).to(DEVICE)
    own = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
    padded = torch.cat((own, own[-1:].expand(12)))
    q, k, v = made.unbind(1)
    got, want = (
        bidirectional(q, k, v, WholePrompts(starts, most), 0.25, backend=Backend.TRITON)
        for starts, most in ((padded, tokens), (own, max(lengths)))
    )
    torch.testing.assert_close(got[:-spare], want[:-spare], rtol=0, atol=0)
    reference = BIDIRECTIONAL.load(Backend.TORCH)(q, k, v, WholePrompts(padded, tokens), 0.25)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got[:-spare], reference[:-spare], rtol=rtol, atol=atol)


def test_every_tile_is_somebodys_once():
    """Whatever the lengths: what is left of the list begins behind the end of the last sequence."""
    for lengths in ([], [0], [1], [0, 0, 5, 0], [64] * 3, [63, 65, 1, 128, 0], [300, 2]):
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        tokens, most = sum(lengths) + 70, max(lengths, default=0)
        for bound in (most, tokens):
            tiles = WholePrompts(starts, bound).tiles(tokens, 64).tolist()
            real = [tuple(tile) for tile in tiles if tile[2] < tile[1]]
            begins = starts.tolist()
            assert real == [
                (begin, length, first)
                for begin, length in zip(begins, lengths, strict=False)
                for first in range(0, length, 64)
            ]
