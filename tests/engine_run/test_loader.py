"""Weights from safetensors files: found, checked, cast, cut for a rank, else left unread."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.config import EngineConfig
from tandem.engine.loader import LoadError, SafetensorsWeights, open_weights

CPU = torch.device("cpu")
TENSORS = {
    "embed.weight": torch.arange(48, dtype=torch.float32).view(8, 6),
    "norm.weight": torch.linspace(-1, 1, 6),
    "up.weight": torch.arange(24, dtype=torch.bfloat16).view(4, 6),
}


def single(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    save_file(TENSORS if tensors is None else tensors, folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    """A folder with two weight files and their index."""
    parts = {"a.safetensors": ["embed.weight"], "b.safetensors": ["norm.weight", "up.weight"]}
    for file, names in parts.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    owners = {name: file for file, names in parts.items() for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    return folder


def weights_of(folder: Path, dtype: torch.dtype = torch.float32) -> SafetensorsWeights:
    return SafetensorsWeights(folder, dtype=dtype, device=CPU, progress=False)


@pytest.mark.parametrize("layout", [single, sharded])
def test_tensors_come_back_cast(tmp_path: Path, layout):
    """One file or several, every tensor has its values in the engine's dtype."""
    with weights_of(layout(tmp_path)) as weights:
        assert list(weights.names()) == sorted(TENSORS)
        for name, expected in TENSORS.items():
            got = weights.get(name, expected.shape)
            assert got.dtype == torch.float32
            assert torch.equal(got, expected.float())


def test_equal_dtype_is_not_copied(tmp_path: Path):
    """A tensor that needs no cast is a view of the mapped file, valid after the file is closed."""
    with weights_of(single(tmp_path)) as weights:
        first, second = weights.get("embed.weight"), weights.get("embed.weight")
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, TENSORS["embed.weight"])


def test_writing_to_a_tensor_leaves_the_file(tmp_path: Path):
    """What is mapped is private: a change never reaches the disk."""
    with weights_of(single(tmp_path)) as weights:
        weights.get("embed.weight").zero_()
    with weights_of(tmp_path) as again:
        assert torch.equal(again.get("embed.weight"), TENSORS["embed.weight"])


def test_missing_tensor_names_its_neighbours(tmp_path: Path):
    """A tensor that no file holds is named, with the folder and what is spelt like it."""
    with weights_of(single(tmp_path)) as weights:
        assert "embd.weight" not in weights
        with pytest.raises(LoadError, match=r"embd\.weight.*embed\.weight") as caught:
            weights.get("embd.weight")
    assert str(tmp_path) in str(caught.value)


def test_wrong_shape_names_both_and_the_file(tmp_path: Path):
    """The error has the shape in the file, the shape that is needed and the file."""
    with weights_of(single(tmp_path)) as weights, pytest.raises(LoadError) as caught:
        weights.get("embed.weight", (8, 7))
    for part in ("(8, 6)", "(8, 7)", "model.safetensors", "embed.weight"):
        assert part in str(caught.value)


def test_packed_integers_are_refused(tmp_path: Path):
    """Integers are some quantisation's codes, never weights as they are."""
    single(tmp_path, {"q": torch.ones(2, 2, dtype=torch.int32)})
    with weights_of(tmp_path) as weights, pytest.raises(LoadError, match="I32"):
        weights.get("q")


def test_unexpected_tensors_are_named(tmp_path: Path):
    """What the model did not ask for is an error, unless a pattern says that it is derived."""
    with weights_of(single(tmp_path)) as weights:
        weights.get("embed.weight")
        with pytest.raises(LoadError, match=r"2 tensors.*norm\.weight, up\.weight.*model"):
            weights.check_all_used()
        assert weights.unused(["up.*"]) == ["norm.weight"]
        weights.check_all_used(ignore=["norm.weight", "up.*"])


def test_one_log_line_says_size_and_time(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Loading ends with one line, however often it is ended."""
    caplog.set_level(logging.INFO)
    weights = weights_of(single(tmp_path))
    for name in TENSORS:
        weights.get(name)
    weights.check_all_used()
    weights.close()
    assert [record.message for record in caplog.records if "GB" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


def test_empty_folder_says_so(tmp_path: Path):
    """No weight file at all is one clear line."""
    with pytest.raises(LoadError, match=r"no \*\.safetensors"):
        weights_of(tmp_path)


def test_absent_shard_is_named(tmp_path: Path):
    """A file that the index names and the folder lacks is named before anything is read."""
    (sharded(tmp_path) / "b.safetensors").unlink()
    with pytest.raises(LoadError, match=r"1 of 2.*b\.safetensors"):
        weights_of(tmp_path)


def test_index_that_lies_is_named(tmp_path: Path):
    """A tensor that its file lacks, contrary to the index, is missing, with both named."""
    index = sharded(tmp_path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "a.safetensors"
    index.write_text(json.dumps(content))
    with weights_of(tmp_path) as weights, pytest.raises(LoadError, match=r"ghost.*a\.safe"):
        weights.get("ghost")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "../a.safetensors"}}'])
def test_broken_index_is_refused(tmp_path: Path, text: str):
    """An index that is not one, or that points out of its folder, is refused."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadError, match=r"index\.json"):
        weights_of(tmp_path)


def test_broken_file_is_named(tmp_path: Path):
    """A file that is no safetensors file is named."""
    (tmp_path / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        weights_of(tmp_path)


def test_two_files_with_one_tensor_are_refused(tmp_path: Path):
    """Without an index, a tensor in two files has no owner."""
    for file in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / file)
    with pytest.raises(LoadError, match=r"x\.safetensors.*y\.safetensors"):
        weights_of(tmp_path)


def test_config_opens_the_embedded_model(smollm2: Path):
    """The embedded default is found by its config, in the dtype that the config resolves."""
    config = EngineConfig.of(smollm2, dtype="bfloat16", device="cpu")
    shape = (config.facts.hidden_size,)
    with open_weights(config, progress=False) as weights:
        assert weights.get("model.norm.weight", shape).dtype == torch.bfloat16
        assert len(weights.unused()) == len(weights.names()) - 1
