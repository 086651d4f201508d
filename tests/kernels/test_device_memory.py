"""Which calls of the driver an allocator of a GPU's memory makes, as far as they can be played.

The driver is played by a list of what it was asked. That it maps what it is asked to, only
tests/engine_run/gpu can show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.kernels.memory import device
from tandem.kernels.memory.device import DeviceMemoryError, DeviceRange, MappedAllocator

SIZE = 1 << 20


class Driver:
    """Gives out handles, and counts who has memory."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.made = 0
        self.mapped: int | None = None
        self.full = False

    def call(self, name: str, *words: Any) -> None:
        """See device.call_driver."""
        if name == "cuMemCreate":
            if self.full:
                raise DeviceMemoryError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
            self.made += 1
            self.held.add(self.made)
            words[0]._obj.value = self.made
        elif name == "cuMemMap":
            if self.mapped is not None:
                raise DeviceMemoryError("cuMemMap failed: CUDA_ERROR_INVALID_VALUE")
            self.mapped = words[3].value

    def cuMemUnmap(self, *_: Any) -> None:
        """The driver's own."""
        self.mapped = None

    def cuMemRelease(self, handle: Any) -> None:
        """The driver's own."""
        self.held.discard(handle.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Instead of a GPU's."""
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
