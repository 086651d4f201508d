"""Saved tensors, read as strangers send them: right ones as torch reads them, others in words."""

from __future__ import annotations

import base64
import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.text.embeds import decoded, read_embeds

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = 1 << 20


def saved(tensor: object, **options: Any) -> bytes:
    """What ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(tensor, file, **options)
    return file.getvalue()


def read(data: bytes) -> PromptEmbeds:
    """As the router reads it."""
    return read_embeds(data, "prompt_embeds", max_bytes=MOST)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Values in their order."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_saves(dtype, protocol):
    """Of every protocol that it writes, values bit for bit."""
    tensor = torch.randn(5, 48).to(dtype)
    found = read(saved(tensor, pickle_protocol=protocol))
    assert (found.dtype, found.hidden_size, found.num_tokens) == (str(dtype)[6:], 48, 5)
    assert found.values == bytes_of(tensor)


def test_shapes_that_are_one_prompt():
    """A batch of one, a view into a larger storage, a parameter's data, a row of a matrix."""
    whole = torch.randn(3, 7, 16)
    for tensor in (whole[1:2], whole[2], whole[1, 2:], whole[0, 3:4], whole[0].requires_grad_()):
        assert read(saved(tensor)).values == bytes_of(tensor.detach())
    large = torch.randn(900, 64)  # sizes of two and four bytes in the pickle
    assert read(saved(large)).values == bytes_of(large)


def test_a_file_of_a_name(tmp_path: Path):
    """Its entries stand under that name."""
    tensor = torch.randn(2, 4)
    torch.save(tensor, tmp_path / "soft_prompt.pt")
    assert read((tmp_path / "soft_prompt.pt").read_bytes()).values == bytes_of(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors(dtype):
    """One tensor under any name, with metadata or without."""
    tensor = torch.randn(5, 48).to(dtype)
    for metadata in (None, {"made": "by a client"}):
        found = read(save_safetensors({"soft prompt": tensor}, metadata))
        assert (found.dtype, found.values) == (str(dtype)[6:], bytes_of(tensor))


class Evil:
    """Whose pickle would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_is_ever_executed(tmp_path: Path):
    """A pickle that runs a command, alone and in the place of a tensor's, is refused unread."""
    touched = tmp_path / "touched"
    for data in (pickle.dumps(Evil(touched)), saved(Evil(touched)), saved([Evil(touched)])):
        with pytest.raises(InvalidParameter, match="prompt_embeds: "):
            read(data)
    assert not touched.exists()
    with warnings.catch_warnings():  # that it would have run, where it is loaded
        warnings.simplefilter("ignore")
        torch.load(io.BytesIO(saved(Evil(touched))), weights_only=False)
    assert touched.exists()


def rezipped(pickled: bytes, storage: bytes = bytes(16), **options: Any) -> bytes:
    """A zip as torch's with another pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", options.pop("method", zipfile.ZIP_STORED)) as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/data/0", storage)
        for name, content in options.items():
            made.writestr(f"archive/{name}", content)
    return file.getvalue()


def pickle_of(shape=(2, 2), stride=(2, 1), offset=0, count=4, kind=b"FloatStorage", key="0"):
    """A tensor's pickle with numbers of one's own, each an int of four bytes."""

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def sizes(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + text(key) + text("cpu")
    rest = number(offset) + sizes(shape) + sizes(stride) + b"\x89ccollections\nOrderedDict\n)RtR."
    begin = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    return begin + storage + number(count) + b"tQ" + rest


PARAMETER = torch.nn.Parameter(torch.randn(2, 2))
TENSOR = torch.randn(2, 4)
RIGHT = saved(TENSOR)
AT = RIGHT.index(bytes_of(TENSOR))
HOSTILE = {
    "empty": (b"", "it begins as neither"),
    "text": (b"not a tensor at all", "it begins as neither"),
    "the older form": (
        saved(torch.randn(2, 2), _use_new_zipfile_serialization=False),
        "before torch 1.6, or a bare pickle",
    ),
    "cut off": (RIGHT[: len(RIGHT) // 2], "the zip ends early"),
    "cut at its end": (RIGHT[:-1], "the zip ends early"),
    "a word behind it": (RIGHT + b"x", "the zip ends early"),
    "a value changed": (RIGHT[:AT] + bytes([RIGHT[AT] ^ 1]) + RIGHT[AT + 1 :], "checksum"),
    "a list of tensors": (saved([torch.randn(2, 2)]), "opcode 0x5d"),
    "a dict": (saved({"x": torch.randn(2, 2)}), "opcode 0x7d"),
    "a parameter": (saved(PARAMETER), "calls what no plain tensor needs"),
    "a number": (saved(5), "not one of a tensor"),
    "transposed": (saved(torch.randn(2, 4).t()), "not contiguous"),
    "expanded": (saved(torch.randn(1, 4).expand(3, 4)), "beyond its storage|not contiguous"),
    "sparse": (saved(torch.eye(3).to_sparse()), "its pickle"),
    "one dimension": (saved(torch.randn(8)), r"\[8\] float32"),
    "a batch": (saved(torch.randn(2, 2, 4)), r"\[positions, hidden_size\]"),
    "four dimensions": (saved(torch.randn(1, 1, 2, 4)), "dimensions"),
    "no position": (saved(torch.randn(0, 4)), "one position or more"),
    "doubles": (saved(torch.randn(2, 4).double()), "float32, float16, bfloat16"),
    "whole numbers": (saved(torch.ones(2, 4, dtype=torch.int64)), "float32, float16, bfloat16"),
    "too large": (saved(torch.zeros(300, 1024)), "at most 1048576 bytes"),
    "a zip bomb": (
        rezipped(pickle_of(), bytes(1 << 20), method=zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "a pickle bomb": (rezipped(b"\x80\x02" + b")" * 5000 + b"."), "pickle"),
    "a long pickle": (rezipped(b"\x80\x02" + b"K\x01" * 4000 + b"."), "longer than that"),
    "many opcodes": (rezipped(b"\x80\x02" + b")" * 400 + b"."), "more opcodes"),
    "tuples in tuples": (
        rezipped(b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 40 + b"."),
        "pickle",
    ),
    "another module's name": (
        rezipped(b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00true\x85tR."),
        "calls what no plain tensor needs",
    ),
    "another storage": (rezipped(pickle_of(kind=b"EvilStorage")), "storage is none that is known"),
    "a path as key": (rezipped(pickle_of(key="../../x")), "storage is none that is known"),
    "a key that is not there": (rezipped(pickle_of(key="7")), "the zip has no data/7"),
    "a storage too short": (rezipped(pickle_of(), bytes(8)), "storage is not as long"),
    "an offset behind it": (rezipped(pickle_of(offset=1)), "beyond its storage"),
    "an offset before it": (rezipped(pickle_of(offset=-1)), "beyond its storage"),
    "a shape beyond it": (rezipped(pickle_of(shape=(3, 2))), "beyond its storage"),
    "a shape beyond all": (rezipped(pickle_of(shape=(2**31 - 1, 2**31 - 1))), "out of all bounds"),
    "a shape below nothing": (rezipped(pickle_of(shape=(-2, -2))), "its shape"),
    "strides that overlap": (rezipped(pickle_of(stride=(1, 1))), "not contiguous"),
    "strides too few": (rezipped(pickle_of(stride=(1,))), "not contiguous"),
    "big-endian": (rezipped(pickle_of(), byteorder=b"big"), "not little-endian"),
    "many entries": (rezipped(pickle_of(), **{f"e{n}": b"" for n in range(40)}), "directory"),
    "nothing in a zip": (b"PK\x03\x04" + bytes(18) + b"PK\x05\x06" + bytes(18), "something else"),
    "two safetensors": (save_safetensors({"a": torch.ones(1), "b": torch.ones(1)}), "2 tensors"),
    "safetensors of whole numbers": (
        save_safetensors({"a": torch.ones(2, 2, dtype=torch.int32)}),
        "float32, float16, bfloat16",
    ),
    "a safetensors header without end": (b"\xff" * 64, "it begins as neither"),
    "a safetensors header of nothing": (struct.pack("<Q", 4) + b"null", "not that of a saf"),
    "safetensors cut off": (save_safetensors({"a": torch.ones(2, 2)})[:-1], "its values are not"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_all_else_is_refused_in_words(name):
    """With the field, what came and what is allowed."""
    data, words = HOSTILE[name]
    with pytest.raises(InvalidParameter, match=words) as caught:
        read(data)
    assert caught.value.param == "prompt_embeds"


def test_entries_that_overlap():
    """Two entries of the directory that share bytes of the file, checksums right."""
    data = bytearray(rezipped(pickle_of()))
    at = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 200)
    struct.pack_into("<I", data, at + 20, 200)
    with pytest.raises(InvalidParameter, match="entries of the zip overlap"):
        read(bytes(data))


@pytest.mark.parametrize("offset", [0, 1 << 12, 1 << 31, (1 << 32) - 2])
@pytest.mark.parametrize("entries", [(0,), (1,), (0, 1)])
def test_entries_beyond_the_end(entries, offset):
    """A directory whose entries begin behind it, one of them or all: words, and no other error."""
    data = bytearray(rezipped(pickle_of()))
    at = 0
    for index in range(2):
        at = data.index(b"PK\x01\x02", at) + 4
        if index in entries:
            begin = min(len(data) + offset, (1 << 32) - 2)
            struct.pack_into("<I", data, at + 38, begin)
    with pytest.raises(InvalidParameter, match="lies beyond its end"):
        read(bytes(data))


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


def as_torch_reads(data: bytes) -> torch.Tensor:
    """By its own restricted unpickler, which warns of protocols that it may know too little of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor: torch.Tensor = torch.load(io.BytesIO(data), weights_only=True)
    return tensor


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_changed_bytes_give_words_or_the_tensor(data):
    """Bytes of a right file changed, cut out or put in, checksums mended or not: a tensor whose
    bytes lie in the file, or an InvalidParameter; nothing else is raised."""
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


@contextmanager
def suppress_opcodes() -> Iterator[None]:
    """Torch's careful reader lacks opcodes of the protocols behind 2, which are read here."""
    try:
        yield
    except pickle.UnpicklingError as error:
        if "Unsupported operand" not in str(error):
            raise


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_changed_pickles_give_words_or_what_torch_reads(data):
    """Under a right checksum: where a tensor is read, torch reads the same one, unless its own
    careful reader lacks an opcode of the protocols behind 2."""
    pickled = bytearray(pickle_of())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(pickled) - 1))
        pickled[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
        if not pickled:
            break
    file = rezipped(bytes(pickled), bytes(range(16)), version=b"3\n", byteorder=b"little")
    try:
        found = read(file)
    except InvalidParameter:
        return
    with suppress_opcodes():
        theirs = as_torch_reads(file)
        assert found.values == bytes_of(theirs.detach())
        assert [found.num_tokens, found.hidden_size] == list(theirs.shape[-2:])


OPCODES = b"(.)Q0RXKMJtqchc\x80\x85\x86\x87\x88\x89\x8a\x8c\x93\x94\x95"


@settings(max_examples=600, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from([bytes([each]) for each in OPCODES]),
            st.binary(max_size=4),
            st.sampled_from([b"ctorch._utils\n_rebuild_tensor_v2\n", b"h\x00", b"q\x00"]),
        ),
        max_size=80,
    )
)
def test_any_opcodes_end_in_words(parts):
    """Whatever they say, within a bounded number of steps."""
    with pytest.raises(InvalidParameter):
        read(rezipped(b"\x80\x02" + b"".join(parts)))


@settings(max_examples=300, deadline=None)
@given(header=st.binary(max_size=200), tail=st.binary(max_size=64))
def test_any_safetensors_header_ends_in_words(header, tail):
    """JSON or not."""
    try:
        found = read(struct.pack("<Q", len(header)) + header + tail)
    except InvalidParameter:
        return
    assert found.values == tail
