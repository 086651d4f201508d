"""Streams of those who come again: none is made anew, since a device has few and gives them out in
turn, those that others use among them. Without a GPU: its streams are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.loader import safetensors
from tandem.engine.loader.safetensors import Uploader
from tandem.engine.worker.graphs import Capturing
from tandem.engine.worker.offload import _Queue
from tandem.memory import streams
from tandem.memory.streams import borrow_stream

GPU = torch.device("cuda", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device
            found.append(self)

        def synchronize(self) -> None:
            """Nothing is queued."""

    monkeypatch.setattr(streams, "_spare", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    here = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: here)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    return found


def test_two_owners_never_have_the_same_stream(made: list[Any]) -> None:
    """The next one has it when one is gone; of another device, it has another."""
    first, second = threading.Event(), threading.Event()
    one, two = borrow_stream(first, GPU), borrow_stream(second, GPU)
    assert one is not two
    del second
    third = threading.Event()
    assert borrow_stream(third, GPU) is two
    assert borrow_stream(third, torch.device("cuda", 1)).device.index == 1
    assert len(made) == 3


def test_captures_of_all_wake_ups_have_one_stream(made: list[Any]) -> None:
    """An engine's graphs go when it sleeps, and are captured anew."""
    for _ in range(3):
        capturing = Capturing(GPU)
        assert capturing._stream is made[0]
        del capturing
    assert len(made) == 1


def test_a_tier_that_comes_again_has_its_two_streams(made: list[Any]) -> None:
    """One for stores and one for loads."""
    for _ in range(3):
        queue = _Queue(GPU)
        assert {queue._stores, queue._loads} == set(made)
        del queue
    assert len(made) == 2


def test_threads_that_read_weights_have_the_streams_of_those_before(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of them one of its own, however often weights are loaded."""
    monkeypatch.setattr(safetensors, "PIECE_BYTES", 128)
    path, wanted = tmp_path / "weights", torch.arange(256).to(torch.uint8)
    path.write_bytes(wanted.numpy().tobytes())
    for _ in range(3):
        uploader, both = Uploader(GPU, threads=2), threading.Barrier(2)
        monkeypatch.setattr(uploader, "_stream", partial(_met, uploader._stream, both))
        into = torch.zeros(256, dtype=torch.uint8)
        uploader.read(path, 0, into)
        uploader.close()
        assert torch.equal(into, wanted)
    assert len(made) == 2


def _met(stream: Callable[[], Any], both: threading.Barrier) -> Any:
    """One's stream, as soon as another thread has one, too."""
    found = stream()
    both.wait(10.0)
    return found
