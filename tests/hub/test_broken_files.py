"""Files that broke off, are empty or are something else: one line names the file and its sizes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hub.conftest import SERVABLE

from tandem.cli.__main__ import main
from tandem.cli.serve.listening import free_ports
from tandem.hub import UnsupportedModel, prepare
from tandem.hub.errors import HubError
from tandem.hub.gguf.reader import GgufModel

Build = Callable[..., Path]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n"


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_gguf_file_that_broke_off_in_its_values_says_both_sizes(gguf_file: Build, kind: str):
    """A download of 90 % is told from a file of another format."""
    whole = gguf_file(kind=kind)
    content = whole.read_bytes()
    cut = whole.with_name("cut.gguf")
    cut.write_bytes(content[: len(content) * 9 // 10])
    with pytest.raises(UnsupportedModel) as refused:
        GgufModel(cut)
    said = str(refused.value)
    assert f"{cut} is truncated: {cut.stat().st_size} bytes of at least " in said
    wanted = int(said.partition("at least ")[2].partition(";")[0])
    assert len(content) - 32 <= wanted <= len(content)  # what follows the last tensor is padding


def test_a_gguf_file_that_broke_off_anywhere_is_truncated(gguf_file: Build):
    """In the header, a string, a list, a tensor's description: never something else's error."""
    whole = gguf_file()
    content = whole.read_bytes()
    cut = whole.with_name("cut.gguf")
    for size in [4, 7, 8, 23, *range(24, 3000, 61), len(content) // 2, len(content) - 64]:
        cut.write_bytes(content[:size])
        with pytest.raises(UnsupportedModel, match=rf"is truncated: {size} bytes"):
            GgufModel(cut)
    GgufModel(whole)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (POINTER, "git lfs pull"), (b"PK\3\4", "not a GGUF file")],
)
def test_what_is_no_gguf_file_says_what_it_is(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=words):
        prepare(str(path), cache_dir=tmp_path / "cache", progress=False)


EMPTY_LIST = b"\2" + b"\0" * 7 + b"[]"
EMPTY_OBJECT = b"\2" + b"\0" * 7 + b"{}"
NO_OFFSETS = b"\7" + b"\0" * 7 + b'{"a":1}'
NO_JSON = b"\7" + b"\0" * 7 + b"nothing"


@pytest.mark.parametrize(
    ("size", "words"), [(5, "5 bytes of at least 8"), (20, "20 bytes"), (-1, "")]
)
def test_a_safetensors_file_that_broke_off_says_both_sizes(
    model_folder: Build, size: int, words: str
):
    """Before any worker starts, which would end in a traceback."""
    folder = model_folder()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(
        UnsupportedModel, match=f"safetensors is truncated: {words}.*fetch it again"
    ):
        prepare(str(folder))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "model.safetensors is empty"),
        (POINTER, "git lfs pull"),
        (b"\xff" * 64, "not a safetensors file"),
        (EMPTY_LIST, "not a safetensors file"),
        (EMPTY_OBJECT, "holds no tensors"),
        (NO_OFFSETS, "not a safetensors file"),
        (NO_JSON, "not a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_named(model_folder: Build, content: bytes, words: str):
    """Whatever lies there under that name."""
    folder = model_folder()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=words):
        prepare(str(folder))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "weight_map"),
        ({"weight_map": ["a"]}, "weight_map"),
        ({"weight_map": {"a": 1}}, "weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "weight_map"),
        ({"weight_map": {"a": "x.safetensors"}}, "lacks 1 weight file: x.safetensors, which"),
        (
            {"weight_map": {name: f"{name}.safetensors" for name in "abcde"}},
            "lacks 5 weight files: a.safetensors, b.safetensors, c.safetensors, and more",
        ),
    ],
)
def test_an_index_that_names_what_is_not_there(model_folder: Build, index: object, words: str):
    folder = model_folder()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HubError, match=words):
        prepare(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"[1]", "holds a list"),
        (b"\xff\xfe", "is not JSON"),
        (POINTER, "lfs"),
    ],
)
def test_json_that_is_none_is_named(model_folder: Build, name: str, content: bytes, words: str):
    folder = model_folder()
    (folder / name).write_bytes(content)
    with pytest.raises(UnsupportedModel, match=f"{name}.*{words}"):
        prepare(str(folder))


def test_a_folder_in_the_place_of_a_file_is_named(model_folder: Build):
    """What cannot be read is the user's to mend, as far as the words go."""
    folder = model_folder()
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(UnsupportedModel, match=r"config.json cannot be read: Is a directory"):
        prepare(str(folder))


@pytest.mark.parametrize("command", ["up", "serve", "decode", "prefill"])
def test_every_command_says_so_in_a_line(
    command: str, model_folder: Build, capsys: pytest.CaptureFixture[str]
):
    """Exit status 2, no traceback, no usage, no process started."""
    folder = model_folder(**SERVABLE)
    (folder / "model.safetensors").write_bytes(b"")
    (port,) = free_ports(1)
    assert main(shlex.split(f"{command} --model {folder} --port {port}")) == 2
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"tandem {command}: model: {folder}/model.safetensors is empty"
    ]
