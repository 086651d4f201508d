import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.hub import ModelNotFound, UnsupportedModel, prepare

Build = Callable[..., Path]


def test_used_where_it_lies(model_folder: Build):
    """A whole folder is served as it is, without a copy."""
    folder = model_folder()
    model = prepare(str(folder))
    assert model.path == folder
    assert model.revision is None
    assert len(model.fingerprint) == 32


def test_fingerprint_is_of_the_content(model_folder: Build, tmp_path: Path):
    """Copies have one fingerprint wherever they lie; other weights or settings have another."""
    first = model_folder("first")
    copy = shutil.copytree(first, tmp_path / "copy")
    prints = [
        prepare(str(folder)).fingerprint
        for folder in (
            first,
            copy,
            model_folder("weights", seed=1),
            model_folder("config", rope_theta=5e5),
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_fingerprint_ignores_where_a_config_came_from(model_folder: Build):
    """The keys that say which program wrote config.json do not make a model another."""
    plain, noted = model_folder("a"), model_folder("b", transformers_version="5", _name_or_path="x")
    assert prepare(str(plain)).fingerprint == prepare(str(noted)).fingerprint


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(model_folder: Build, file: str):
    """A folder that lacks a needed file is refused before anything starts."""
    folder = model_folder()
    (folder / file).unlink()
    with pytest.raises(ModelNotFound, match=file.split(".")[-1]):
        prepare(str(folder))


def test_config_alone_is_enough_without_weights(model_folder: Build):
    """Dummy weights need nothing but config.json."""
    folder = model_folder()
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    assert prepare(str(folder), weights=False).path == folder


def test_missing_shard_is_named(model_folder: Build):
    """Every file that the index names has to be there."""
    folder = model_folder()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match="model-00002-of-00002"):
        prepare(str(folder))


def test_weights_that_nobody_loads_are_not_looked_at(model_folder: Build):
    """The same weights once more, under another name and broken off: the loader takes
    model.safetensors where there is no index."""
    folder = model_folder()
    before = prepare(str(folder)).fingerprint
    (folder / "consolidated.safetensors").write_bytes(b"broken off")
    assert prepare(str(folder)).fingerprint == before
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert prepare(str(folder)).fingerprint != before, "now it is the one that is loaded"


@pytest.mark.parametrize(
    ("other", "hint"),
    [("pytorch_model.bin", "may run code"), ("model.Q4_K_M.gguf", "give the file itself")],
)
def test_weights_in_another_format(model_folder: Build, other: str, hint: str):
    """Weights in a format that is not served are named, with what to do."""
    folder = model_folder()
    (folder / "model.safetensors").rename(folder / other)
    with pytest.raises(UnsupportedModel, match=hint):
        prepare(str(folder))


def test_sentencepiece_tokenizer_alone(model_folder: Build):
    """A folder with only tokenizer.model is refused, and the message says how to make the other."""
    folder = model_folder()
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        prepare(str(folder))


@pytest.mark.parametrize(
    ("text", "hint"), [("{", "is not JSON"), ("[]", "list"), ("{}", "neither")]
)
def test_broken_config(model_folder: Build, text: str, hint: str):
    """A config.json that says nothing usable is refused with the reason."""
    folder = model_folder()
    (folder / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=hint):
        prepare(str(folder))


def test_revision_needs_a_hub_id(model_folder: Build):
    """A folder has no revisions, and asking for one is an error."""
    with pytest.raises(UnsupportedModel, match="only a hub id has revisions"):
        prepare(str(model_folder()), revision="main")
