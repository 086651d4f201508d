"""Which calls of the driver an allocator of a GPU's memory makes, as far as they can be played.

The driver is played by a list of what it was asked. That it maps what it is asked to, only
tests/engine_run/gpu can show.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.memory import device
from tandem.memory.device import DeviceMemoryError, DeviceRange, MappedAllocator

SIZE = 1 << 20
GRAIN = 2 << 20
ADDRESS = 7 << 40


class Driver:
    """Gives out handles, and counts who has memory."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.made = 0
        self.mapped: int | None = None
        self.full = False

    def call(self, name: str, *words: Any) -> None:
        if name == "cuMemCreate":
            if self.full:
                raise DeviceMemoryError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
            self.made += 1
            self.held.add(self.made)
            words[0]._obj.value = self.made
        elif name == "cuMemGetAllocationGranularity":
            words[0]._obj.value = GRAIN
        elif name == "cuMemAddressReserve":
            words[0]._obj.value = ADDRESS
        elif name == "cuMemMap":
            if self.mapped is not None:
                raise DeviceMemoryError("cuMemMap failed: CUDA_ERROR_INVALID_VALUE")
            self.mapped = words[3].value

    def cuMemUnmap(self, *_: Any) -> None:
        self.mapped = None

    def cuMemRelease(self, handle: Any) -> None:
        self.held.discard(handle.value)

    def cuMemAddressFree(self, *_: Any) -> None:
        """The driver's own."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(device, "call_driver", found.call)
    monkeypatch.setattr(device, "driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    return found


def test_memory_that_was_taken_again_is_not_taken_twice(driver: Driver) -> None:
    """A wake that fails behind the slab is asked for again: what is there stays as it is."""
    allocator = MappedAllocator(torch.device("cuda", 0))
    tensor = torch.empty(SIZE, dtype=torch.uint8)
    allocator._ranges[tensor.data_ptr()] = given = DeviceRange(tensor.data_ptr(), SIZE, 0)
    driver.full = True
    with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
        allocator.take_again(tensor)
    driver.full = False
    for _ in range(2):
        allocator.take_again(tensor)
        assert driver.held == {given.handle}
        assert driver.mapped == given.handle
    assert allocator.give_back(tensor) == SIZE
    assert not driver.held
    allocator.take_again(tensor)
    assert driver.held == {driver.mapped}


def test_new_memory_waits_for_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is not waited for while a stream of it is captured: that breaks the capture, which
    another thread than the caller's may be at."""

    def refused(_device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    given = []

    def tensor_of(mapping: Any, **_: Any) -> torch.Tensor:
        given.append(mapping)
        return torch.empty(mapping.__cuda_array_interface__["shape"], dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    monkeypatch.setattr(torch, "as_tensor", tensor_of)
    memory = MappedAllocator(torch.device("cuda", 0))(SIZE)
    assert memory.numel() == GRAIN
    assert driver.held == {driver.mapped}
    assert given[0].__cuda_array_interface__["data"] == (ADDRESS, False)
    given.clear()  # nobody refers to it any more
    assert not driver.held


@pytest.mark.parametrize(("status", "is_full"), [(2, True), (801, False)])
def test_a_full_device_is_told_from_one_that_cannot(
    monkeypatch: pytest.MonkeyPatch, status: int, is_full: bool
) -> None:
    library = SimpleNamespace(cuMemCreate=lambda: status, cuGetErrorName=lambda *_: 0)
    monkeypatch.setattr(device, "driver", lambda: library)
    with pytest.raises(device.DeviceMemoryError, match="cuMemCreate failed") as failed:
        device.call_driver("cuMemCreate")
    assert isinstance(failed.value, device.DeviceFullError) is is_full
