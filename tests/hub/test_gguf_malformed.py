"""Malformed GGUF files: each ends in UnsupportedModel with what is wrong, at once."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.hub import UnsupportedModel, prepare
from tandem.hub.gguf.convert import convert
from tandem.hub.gguf.head import head_bytes

Build = Callable[..., Path]
MUTATIONS = 300
STRING, ARRAY = 8, 9


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return _text(name) + shape + struct.pack("<IQ", kind, offset)


def _file(
    keys: list[bytes],
    tensors: list[bytes],
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_keys = len(keys) if num_keys is None else num_keys
    head = struct.pack("<IQQ", version, num_tensors, num_keys)
    return b"GGUF" + head + b"".join(keys) + b"".join(tensors) + bytes(256)


def _nested(depth: int) -> bytes:
    """A list in a list in a list..."""
    return (struct.pack("<IQ", ARRAY, 1) * depth) + struct.pack("<IQ", 4, 0)


FAMILY = _key(b"general.architecture", STRING, _text(b"llama"))
MALFORMED: dict[str, tuple[bytes, str]] = {
    "lists in lists": (_file([_key(b"a", ARRAY, _nested(50_000))], []), "list of lists"),
    "many empty lists": (
        _file([_key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 3_000_000) + bytes(36_000_000))], []),
        "list of lists",
    ),
    "a list that never ends": (
        _file([_key(b"a", ARRAY, struct.pack("<IQ", STRING, 2**63))], []),
        "more than 4,000,000 values",
    ),
    "lists that are long together": (
        _file(
            [
                _key(b"%d" % at, ARRAY, struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20))
                for at in range(5)
            ],
            [],
        ),
        "more than 4,000,000 values",
    ),
    "keys": (_file([], [], num_keys=2**62), "keys; at most 4096"),
    "tensors": (_file([], [], num_tensors=2**62), "tensors; at most 65536"),
    "a long text": (_file([_key(b"a", STRING, struct.pack("<Q", 2**62))], []), "at most 16777216"),
    "a long key": (_file([struct.pack("<Q", 2**40)], []), "at most 1024"),
    "no text": (_file([_key(b"a", STRING, _text(b"\xff\xfe"))], []), "not UTF-8"),
    "a key twice": (_file([FAMILY, FAMILY], []), "general.architecture twice"),
    "an unknown type": (_file([_key(b"a", 77, b"")], []), "type 77"),
    "neither true nor false": (_file([_key(b"a", 7, b"\x07")], []), "neither true nor false"),
    "another version": (_file([], [], version=9), "version 9; 2, 3 are read"),
    "no dimensions": (_file([], [_tensor(b"t", [], 0, 0)]), "0 dimensions"),
    "many dimensions": (_file([], [_tensor(b"t", [1] * 9, 0, 0)]), "9 dimensions"),
    "an empty extent": (_file([], [_tensor(b"t", [0, 4], 0, 0)]), "each extent"),
    "extents that overflow": (_file([], [_tensor(b"t", [2**62, 2**62], 0, 0)]), "each extent"),
    "large extents": (_file([], [_tensor(b"t", [2**40] * 4, 0, 0)]), "truncated"),
    "an offset beyond the end": (_file([], [_tensor(b"t", [4], 0, 1 << 40)]), "truncated"),
    "an odd offset": (_file([], [_tensor(b"t", [4], 0, 3)]), "not a multiple of 32"),
    "an unknown tensor type": (_file([], [_tensor(b"t", [4], 200, 0)]), "type 200"),
    "half a block": (_file([], [_tensor(b"t", [31], 8, 0)]), "Q8_0 packs 32"),
    "a tensor twice": (_file([], [_tensor(b"t", [4], 0, 0)] * 2), "tensor t twice"),
    "alignment of nothing": (
        _file([_key(b"general.alignment", 4, struct.pack("<I", 0))], []),
        "power of two",
    ),
    "alignment in words": (
        _file([_key(b"general.alignment", STRING, _text(b"32"))], []),
        "power of two",
    ),
    "no family": (_file([], []), "lacks the key general.architecture"),
    "a family that is no text": (
        _file([_key(b"general.architecture", 4, bytes(4))], []),
        "architecture 0",
    ),
    "parts in words": (
        _file([FAMILY, _key(b"split.count", STRING, _text(b"2"))], []),
        "split.count",
    ),
}


@pytest.mark.parametrize(("content", "words"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_says_what_is_wrong(tmp_path: Path, content: bytes, words: str):
    """Before anything of the size that it claims is done."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert head_bytes(path) <= len(content)
    with pytest.raises(UnsupportedModel, match=words):
        prepare(str(path), cache_dir=tmp_path / "cache", progress=False)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.block_count": "one"}, "llama.block_count 'one'; an integer from 1"),
        ({"llama.block_count": 0}, "llama.block_count 0"),
        ({"llama.block_count": 2}, "lacks the tensor blk.1"),
        ({"llama.block_count": 4_000_000_000}, "an integer from 1 to 1024"),
        ({"llama.attention.head_count": [4, 4]}, "head_count"),
        ({"llama.attention.head_count_kv": 3}, "a divisor of the 4 heads"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "a finite number above 0"),
        ({"llama.rope.freq_base": 0.0}, "a finite number above 0"),
        ({"llama.rope.freq_base": float("inf")}, "a finite number above 0"),
        ({"llama.embedding_length": 64}, r"shape \(10, 32\)"),
        ({"llama.vocab_size": 11}, "vocab_size 11; 10, the rows"),
        ({"tokenizer.ggml.bos_token_id": 10}, "an integer from 0 to 9"),
        ({"tokenizer.ggml.eos_token_id": "<end>"}, "eos_token_id"),
        ({"tokenizer.ggml.add_bos_token": 1}, "true or false"),
        ({"tokenizer.ggml.merges": ["ab"]}, "two parts"),
        ({"tokenizer.ggml.merges": ["a z"]}, "is not BPE"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "a list of texts"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "one number for each"),
        ({"tokenizer.chat_template": 5}, "chat_template 5; a text"),
    ],
)
def test_a_key_of_another_kind_is_refused_by_its_name(
    gguf_file: Build, tmp_path: Path, extra: dict[str, Any], words: str
):
    with pytest.raises(UnsupportedModel, match=words):
        convert(gguf_file(extra=extra), tmp_path, progress=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": {"blk.0.ffn_up.weight": np.ones((3, 3), np.float32)}}, r"shape \(3, 3\)"),
        ({"tensors": {"blk.7.ffn_up.weight": np.ones((64, 32), np.float32)}}, "among 1 layers"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(3, np.float32)}}, "attn_q.bias has shape"),
        ({"tensors": {"rope_freqs.weight": np.ones(7, np.float32)}}, "rope_freqs.weight of shape"),
        ({"without": ("token_embd.weight",)}, "lacks a matrix token_embd.weight"),
        ({"without": ("blk.0.attn_v.weight",)}, "lacks the tensor blk.0.attn_v.weight"),
    ],
)
def test_tensors_that_fit_no_key_are_refused_by_name(
    gguf_file: Build, tmp_path: Path, change: dict[str, Any], words: str
):
    with pytest.raises(UnsupportedModel, match=words):
        convert(gguf_file(**change), tmp_path, progress=False)


@pytest.mark.parametrize("seed", range(4))
def test_a_file_with_any_bytes_changed_is_converted_or_refused(
    gguf_file: Build, tmp_path: Path, seed: int
):
    """Bytes flipped, cut out, put in, numbers made large: no other error ends it."""
    rng = random.Random(seed)
    whole = gguf_file("qwen2" if seed % 2 else "llama")
    content = whole.read_bytes()
    end = head_bytes(whole)
    refused = 0
    for _ in range(MUTATIONS // 4):
        changed = _mutated(content, end, rng)
        whole.write_bytes(changed)
        head_bytes(whole)
        try:
            convert(whole, tmp_path, progress=False)
        except UnsupportedModel:
            refused += 1
    assert refused > 0


def _mutated(content: bytes, end: int, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(4, end)
        match rng.randrange(5):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 16)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
            case 3:
                number = rng.choice((0, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
                changed[at : at + 8] = struct.pack("<Q", number)
            case 4:
                changed[at] = rng.randrange(256)
    return bytes(changed)
