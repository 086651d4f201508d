"""Reading tensors past the mapping: where they lie in the file, and all of their bytes."""

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.loader import BadWeightsFile
from tandem.engine.loader.files import places_in
from tandem.engine.loader.upload import PIECE_BYTES, Uploader

CPU = torch.device("cpu")


@pytest.fixture
def weights(tmp_path):
    """A file with a tensor of several pieces, an odd one and a scalar, and what is in it."""
    tensors = {
        "large": torch.randn(3, PIECE_BYTES // 4),
        "odd": torch.randn(7, 3).to(torch.bfloat16),
        "one": torch.tensor(4.5, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors", tensors


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives(weights, threads):
    """Tensors read piece by piece by several threads are those that were saved."""
    path, tensors = weights
    places = places_in(path)
    uploader = Uploader(CPU, threads=threads)
    for name, want in tensors.items():
        got = torch.empty(places[name].shape, dtype=want.dtype)
        uploader.read(path, places[name].offset, got)
        assert torch.equal(got, want)
    uploader.close()
    uploader.close()


def test_a_file_that_ends_early_is_named(weights):
    """A truncated file is an error with its name, not garbage in the weights."""
    path, tensors = weights
    place = places_in(path)["large"]
    with path.open("r+b") as file:
        file.truncate(place.offset + 1000)
    uploader = Uploader(CPU, threads=2)
    with pytest.raises(BadWeightsFile, match=r"model\.safetensors ends \d+ bytes before"):
        uploader.read(path, place.offset, torch.empty_like(tensors["large"]))
    uploader.close()


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{broken}", b"\xff" * 20])
def test_a_broken_header_is_named(tmp_path, content):
    """What is no safetensors file is refused with its name."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadWeightsFile, match=r"model\.safetensors cannot be read"):
        places_in(path)
