"""Block moves and the digest."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kernels import BadTensor
from tandem.kernels.bits import GAMMA, logical_shift, mix, mix_int, signed
from tandem.kernels.blocks import copy, digest, pack, unpack
from tandem.kernels.blocks.multilinear import WORDS

MASK = (1 << 64) - 1
SEED = 0x74616E64656D0001


def random_bytes(*shape, seed=0):
    """Bytes that are the same every time."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(seed))


def slow_digest(data: bytes) -> int:
    """The formula of the docstring on Python integers."""
    keys = [mix_int(SEED + i * GAMMA) for i in range(1, 2 * WORDS + 1)]
    total = len(data)
    for j in range(-(-len(data) // (8 * WORDS))):
        chunk = data[j * 8 * WORDS : (j + 1) * 8 * WORDS].ljust(8 * WORDS, b"\0")
        words = [
            int.from_bytes(chunk[i : i + 8], "little", signed=True) for i in range(0, len(chunk), 8)
        ]
        s1 = sum(k * w for k, w in zip(keys[:WORDS], words, strict=True))
        s2 = sum(k * (w >> 32) for k, w in zip(keys[WORDS:], words, strict=True))
        total += mix_int(s1 + mix_int(s2 + (j + 1) * GAMMA))
    return total % (1 << 64)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 11), unique=True, max_size=12), st.sampled_from([8, 24, 4096]))
def test_pack_then_unpack_restores_the_blocks(ids, block_bytes):
    """What was packed and unpacked elsewhere is the same bytes, and nothing else is touched."""
    kv_cache = random_bytes(12, block_bytes)
    index = torch.tensor(ids, dtype=torch.int64)
    packed = torch.empty(len(ids), block_bytes, dtype=torch.uint8)
    pack(kv_cache, index, packed)
    assert torch.equal(packed, kv_cache[index])
    other = random_bytes(12, block_bytes, seed=1)
    want = other.clone()
    want[index] = packed
    unpack(packed, index, other)
    assert torch.equal(other, want)


def test_copy_moves_whole_blocks():
    """A fork's copy leaves its source and every other block alone."""
    kv_cache = random_bytes(6, 64)
    want = kv_cache.clone()
    want[4], want[5] = want[0], want[2]
    copy(kv_cache, torch.tensor([0, 2]), torch.tensor([4, 5]))
    assert torch.equal(kv_cache, want)


def test_moves_name_what_does_not_fit():
    """Ids of the wrong type, rows of the wrong size and gaps are refused."""
    kv_cache = random_bytes(6, 64)
    with pytest.raises(BadTensor, match=r"ids is torch\.int32"):
        pack(kv_cache, torch.tensor([1], dtype=torch.int32), kv_cache[:1])
    with pytest.raises(BadTensor, match="packed has shape"):
        unpack(kv_cache[:1, :32], torch.tensor([1]), kv_cache)
    with pytest.raises(BadTensor, match="kv_cache has strides"):
        pack(kv_cache[:, ::2], torch.tensor([1]), kv_cache[:1, :32])
    with pytest.raises(BadTensor, match="strides"):
        digest(kv_cache[:, ::2])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 8191, 8192, 8193, 3 * 8192, 70_001])
def test_digest_is_the_documented_formula(size):
    """Any length, whole chunks or not, gives the value of the formula on big integers."""
    data = random_bytes(size)
    assert digest(data) == slow_digest(bytes(data.tolist()))


def test_digest_has_the_same_value_everywhere():
    """The value is part of the wire format: pinned."""
    assert digest(torch.arange(0, 256, dtype=torch.uint8)) == 0x986F12EA94A9D8C8
    assert digest(torch.empty(0, dtype=torch.uint8)) == 0


def test_digest_does_not_care_where_the_bytes_lie():
    """A view at an odd address hashes as its copy."""
    data = random_bytes(40_003)
    assert digest(data[3:]) == digest(data[3:].clone())
    assert digest(data[:40_000].view(8, 5000)) == digest(data[:40_000])


def test_every_damage_tried_changes_the_digest():
    """Flipped bits, also pairs of top bits, swapped words and chunks, and lost tails are seen."""
    rng = random.Random(1)
    data = random_bytes(4 * 8192)
    clean = digest(data)
    seen = {clean}
    for _ in range(300):
        bad = data.clone()
        for _ in range(rng.choice((1, 2))):
            bad[rng.randrange(4096) * 8 + 7] ^= 0x80
        seen.add(digest(bad))
        bad = data.clone()
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        seen.add(digest(bad))
    words = data.view(torch.int64).clone()
    words[[5, 900]] = words[[900, 5]]
    chunks = data.view(4, -1).clone()
    chunks[[0, 3]] = chunks[[3, 0]]
    for bad in (words.view(torch.uint8), chunks, data[:-8], data[8:]):
        seen.add(digest(bad.contiguous()))
    repeated = 606 - len(seen)
    assert clean not in seen - {clean}
    assert repeated < 40  # only equal damage repeats


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=20))
@settings(deadline=None)
def test_mix_agrees_with_python_integers(values):
    """The tensor form of SplitMix64 is the integer form, bit for bit."""
    tensor = torch.tensor([signed(v) for v in values])
    assert [v & MASK for v in mix(tensor).tolist()] == [mix_int(v) for v in values]
    assert [v & MASK for v in logical_shift(tensor, 31).tolist()] == [v >> 31 for v in values]
