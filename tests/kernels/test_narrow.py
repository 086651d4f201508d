"""Rows of numbers as float8 with a scale, and back; and parts of blocks."""

import pytest
import torch

from tandem.kernels import BadTensor
from tandem.kernels.blocks import pack_parts, unpack_parts
from tandem.kernels.narrow import LARGEST, narrow, widen

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed_for(count: int, rows: int, width: int, *, behind: int = 0) -> torch.Tensor:
    """Where narrow writes, with ``behind`` bytes of another's after each block."""
    wide = torch.full((count, rows * (width + 4) + behind), 77, dtype=torch.uint8)
    return wide[:, : rows * (width + 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_widen_gives_what_torch_makes_of_the_bytes(dtype):
    """Each of the 256 patterns but the two that are no numbers, with its row's scale."""
    patterns = torch.arange(256, dtype=torch.uint8)
    patterns[0x7F], patterns[0xFF] = 0, 0
    packed = packed_for(1, 4, 64)
    packed[0, :256] = patterns
    scales = torch.tensor([1.0, 0.25, 3.0, 1e-3])
    packed[:, 256:].view(torch.float32)[0] = scales
    out = torch.empty((1, 4, 64), dtype=dtype)
    widen(packed, out)
    numbers = patterns.view(torch.float8_e4m3fn).to(torch.float32).view(4, 64)
    assert torch.equal(out[0], (numbers * scales[:, None]).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_rounds_each_number_within_a_sixteenth(dtype):
    """The largest of a row is exact, as far as the type goes; nothing behind a block is written."""
    values = torch.randn((3, 5, 16), generator=torch.manual_seed(1))
    values = (values * torch.logspace(-4, 3, 5)[None, :, None]).to(dtype)
    packed = packed_for(3, 5, 16, behind=4)
    narrow(values, packed)
    back = torch.empty_like(values)
    widen(packed, back)
    wide, found = values.float(), back.float()
    least = wide.abs().amax(dim=2, keepdim=True) / LARGEST * 2**-9
    assert bool(((found - wide).abs() <= wide.abs() / 15.9 + least).all())
    at = wide.abs().argmax(dim=2, keepdim=True)
    torch.testing.assert_close(found.gather(2, at), wide.gather(2, at), rtol=2**-10, atol=0)
    assert bool((packed.as_strided((3, 4), (packed.stride(0), 1), 100) == 77).all())


def test_a_value_that_is_not_a_number_stays_none():
    """It must not become one that a model goes on with; the rest of its row is as it was."""
    values = torch.ones((1, 1, 4))
    values[0, 0, 2] = torch.nan
    packed, back = packed_for(1, 1, 4), torch.zeros((1, 1, 4))
    narrow(values, packed)
    widen(packed, back)
    assert back.isnan().tolist() == [[[False, False, True, False]]]
    assert back[0, 0, 0] == 1


@pytest.mark.parametrize(
    ("values", "packed", "words"),
    [
        (torch.ones(1, 2, 8, dtype=torch.int32), packed_for(1, 2, 8), "values are"),
        (torch.ones(1, 2, 8), packed_for(1, 2, 9), "packed has shape"),
        (torch.ones(1, 2, 8), packed_for(1, 2, 8).to(torch.int8), "packed is"),
        (torch.ones(1, 1, 3), packed_for(1, 1, 3), "not aligned"),
        (torch.ones(2, 2, 8), packed_for(2, 2, 8, behind=1), "not aligned"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(values, packed, words):
    with pytest.raises(BadTensor, match=words):
        narrow(values, packed)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_blocks_are_gathered_and_scattered(parts):
    """Each run gives an equal share of its bytes; nothing else is touched."""
    rows, width = 6, 8
    kv_cache = torch.randint(0, 256, (5, rows * width), dtype=torch.uint8)
    ids = torch.tensor([3 * parts, 1, 4 * parts + parts - 1])
    packed = torch.empty((3, rows * width // parts), dtype=torch.uint8)
    pack_parts(kv_cache, ids, packed, rows)
    runs, share = kv_cache.view(5, rows, width), width // parts
    for row, at in zip(packed, ids.tolist(), strict=True):
        block, part = divmod(at, parts)
        wanted = runs[block, :, part * share : (part + 1) * share]
        assert torch.equal(row.view(rows, share), wanted)
    other = torch.zeros_like(kv_cache)
    unpack_parts(packed, ids, other, rows)
    again = torch.empty_like(packed)
    pack_parts(other, ids, again, rows)
    assert torch.equal(again, packed)
    assert int((other != 0).sum()) == int((packed != 0).sum())


def test_parts_that_do_not_divide_are_refused():
    """A run is never cut inside a token's share."""
    kv_cache, ids = torch.zeros((2, 48), dtype=torch.uint8), torch.tensor([0])
    for size, rows in ((36, 6), (24, 7)):
        with pytest.raises(BadTensor, match="parts of"):
            pack_parts(kv_cache, ids, torch.zeros((1, size), dtype=torch.uint8), rows)


def test_numbers_that_were_never_written_do_not_reach_others():
    """NaN and infinity behind a block's last token do not change the scale of its row."""
    values = torch.randn((1, 2, 32), generator=torch.manual_seed(2))
    wanted, got = (packed_for(1, 2, 32) for _ in range(2))
    values[:, :, 24:] = 0
    narrow(values, wanted)
    values[:, :, 24:28], values[:, :, 28:] = torch.nan, torch.inf
    narrow(values, got)
    assert torch.equal(got[:, 64:], wanted[:, 64:])
    numbers = [each[:, :64].view(1, 2, 32)[:, :, :24] for each in (got, wanted)]
    assert torch.equal(*numbers)
