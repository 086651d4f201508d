"""Reading tensors past the mapping: where they lie in the file, and all of their bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.loader import LoadError, safetensors
from tandem.engine.loader.files import places_in
from tandem.engine.loader.safetensors import PIECE_BYTES, Uploader

pytestmark = pytest.mark.full

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
    with pytest.raises(LoadError, match=r"model\.safetensors ends \d+ bytes before"):
        uploader.read(path, place.offset, torch.empty_like(tensors["large"]))
    uploader.close()


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{broken}", b"\xff" * 20])
def test_a_broken_header_is_named(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=r"model\.safetensors cannot be read"):
        places_in(path)


def test_a_disk_that_hangs_is_not_waited_for(weights, monkeypatch):
    """Neither by who reads, nor by who closes: its threads are left behind, with their file."""
    path, tensors = weights
    begun, goes_on = threading.Event(), threading.Event()
    plain = os.preadv
    read_of: list[int] = []

    def preadv(file, *rest):
        begun.set()
        goes_on.wait(60.0)
        read_of.append(plain(file, *rest))
        return read_of[-1]

    def wait_behind_the_first(jobs, seconds):
        assert begun.wait(60.0)
        return wait(jobs, seconds)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(safetensors, "wait", wait_behind_the_first)
    monkeypatch.setattr(safetensors, "READ_SECONDS", 0.05)
    monkeypatch.setattr(safetensors, "CLOSE_SECONDS", 0.05)
    uploader = Uploader(CPU, threads=2)
    reading = list(uploader._threads)
    place = places_in(path)["large"]
    try:
        with pytest.raises(TimeoutError, match=r"model\.safetensors did not give"):
            uploader.read(path, place.offset, torch.empty_like(tensors["large"]))
        uploader.close()
        assert any(each.is_alive() for each in reading)
    finally:
        goes_on.set()
    for each in reading:
        each.join(60.0)
    assert not any(each.is_alive() for each in reading)
    assert 1 <= len(read_of) <= 2, "what no thread had begun is not begun; the file was still open"


HANGS = """
import os, sys, time, torch
from pathlib import Path
from tandem.engine.loader import safetensors as upload
os.preadv = lambda *_: time.sleep(3600)
upload.READ_SECONDS = upload.CLOSE_SECONDS = 0.05
uploader = upload.Uploader(torch.device("cpu"), threads=2)
try:
    uploader.read(Path(sys.argv[1]), 0, torch.empty(64, dtype=torch.uint8))
finally:
    uploader.close()
"""


def test_a_process_ends_though_its_disk_hangs(weights: tuple[Path, object]):
    command = [sys.executable, "-c", HANGS, str(weights[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "TimeoutError" in done.stderr
