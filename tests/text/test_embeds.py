"""Safetensors files of clients: right ones give their tensor, all others an error in words."""

from __future__ import annotations

import base64
import io
import os
import pickle
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.text.embeds import decoded, read_embeds

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = 1 << 20
CONVERT = r'safetensors\.torch\.save\(\{"prompt_embeds": tensor\.contiguous\(\)\}\)'


def saved(tensor: torch.Tensor) -> bytes:
    """Return a safetensors file with the tensor."""
    return save({"prompt_embeds": tensor})


def saved_by_torch(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def read(data: bytes) -> PromptEmbeds:
    return read_embeds(data, "prompt_embeds", max_bytes=MOST)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_tensor_of_any_name_is_read_bit_for_bit(dtype):
    tensor = torch.randn(5, 48).to(dtype)
    for metadata in (None, {"made": "by a client"}):
        found = read(save({"soft prompt": tensor}, metadata))
        assert (found.dtype, found.hidden_size, found.num_tokens) == (str(dtype)[6:], 48, 5)
        assert found.values == bytes_of(tensor)


def test_a_batch_of_one_is_one_prompt():
    for tensor in (torch.randn(1, 7, 16), torch.randn(1, 900, 64)):
        assert read(saved(tensor)).values == bytes_of(tensor)


def test_a_header_that_begins_like_a_pickle_is_read():
    """Its length is 640 bytes, and so its first two bytes are those of a pickle."""
    tensor = torch.randn(2, 2)
    rest = save({"x": tensor}, {"a": "b"})
    length = int.from_bytes(rest[:8], "little")
    data = struct.pack("<Q", 640) + rest[8 : 8 + length].ljust(640) + rest[8 + length :]
    assert data.startswith(b"\x80\x02")
    assert read(data).values == bytes_of(tensor)


REFUSED = {
    "empty": (b"", "not the length of a header"),
    "text": (b"not a tensor at all", "not the length of a header"),
    "torch.save": (saved_by_torch(torch.randn(2, 4)), CONVERT),
    "torch.save before 1.6": (
        saved_by_torch(torch.randn(2, 4), _use_new_zipfile_serialization=False),
        CONVERT,
    ),
    "torch.save of a list": (saved_by_torch([torch.randn(2, 4)]), CONVERT),
    "a pickle": (pickle.dumps([1, 2]), CONVERT),
    "one dimension": (saved(torch.randn(8)), r"\[8\] float32"),
    "a batch": (saved(torch.randn(2, 2, 4)), r"\[positions, hidden_size\]"),
    "four dimensions": (saved(torch.randn(1, 1, 2, 4)), "dimensions"),
    "no position": (saved(torch.randn(0, 4)), "one position or more"),
    "doubles": (saved(torch.randn(2, 4).double()), "float32, float16, bfloat16"),
    "whole numbers": (saved(torch.ones(2, 4, dtype=torch.int64)), "float32, float16, bfloat16"),
    "too large": (saved(torch.zeros(300, 1024)), "at most 1048576 bytes"),
    "two tensors": (save({"a": torch.ones(1), "b": torch.ones(1)}), "2 tensors"),
    "a header without end": (b"\xff" * 64, "not the length of a header"),
    "a header of nothing": (struct.pack("<Q", 4) + b"null", "not that of a saf"),
    "cut off": (saved(torch.ones(2, 2))[:-1], "its values are not"),
    "a byte after the end": (saved(torch.ones(2, 2)) + b"x", "its values are not"),
    "a shape beyond its values": (
        saved(torch.ones(2, 2)).replace(b"[2,2]", b"[2,3]"),
        "shape is not that of its values",
    ),
    "a shape out of bounds": (
        saved(torch.ones(2, 1 << 10)).replace(b"[2,1024]", b"[2,-102]"),
        "out of all bounds",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_else_is_refused_in_words(name):
    data, words = REFUSED[name]
    with pytest.raises(InvalidParameter, match=words) as caught:
        read(data)
    assert caught.value.param == "prompt_embeds"


def test_base64():
    """Whole, in pieces longer than are decoded at a time, and everything that is none."""
    data = os.urandom(200_000)
    text = base64.b64encode(data).decode()
    assert decoded(text, "prompt_embeds", max_bytes=MOST) == data
    for wrong in ("abc", "a$bc", "éé==", text[: 1 << 16][:-1] + "=" + text, text + "\n"):
        with pytest.raises(InvalidParameter, match=r"prompt_embeds: .* base64 of a saved tensor"):
            decoded(wrong, "prompt_embeds", max_bytes=MOST)
    with pytest.raises(InvalidParameter, match="at most 100000 bytes"):
        decoded(text, "prompt_embeds", max_bytes=100_000)


RIGHT = saved(torch.randn(2, 4))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_changed_bytes_give_words_or_the_tensor(data):
    """Bytes of a right file changed, cut out or put in: a tensor whose bytes lie in the file, or
    an InvalidParameter; nothing else is raised."""
    raw = bytearray(RIGHT)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["set", "cut", "put"])):
            case "set":
                raw[at] = data.draw(st.integers(0, 255))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 40))]
            case _:
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        if not raw:
            break
    try:
        found = read(bytes(raw))
    except InvalidParameter:
        return
    assert found.values in bytes(raw)


@settings(max_examples=300, deadline=None)
@given(header=st.binary(max_size=200), tail=st.binary(max_size=64))
def test_any_safetensors_header_ends_in_words(header, tail):
    try:
        found = read(struct.pack("<Q", len(header)) + header + tail)
    except InvalidParameter:
        return
    assert found.values == tail
