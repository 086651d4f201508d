"""Who locks how many bytes of the host, and when they are unlocked.

A GPU's driver locks them; it is played here by a list of what is locked. That a device copies from
such memory without waiting, only tests/engine_run/gpu can show.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap

import pytest
import torch
from tests.kernels.locking import Locks

from tandem.memory.page_locked import DriverRegistrar, HostMemory, HostMemoryError, registrar_for

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB + 3, 40 * MIB])
def test_as_much_is_locked_as_was_asked_for(nbytes: int) -> None:
    """Not the next power of two; from the start of a page, dense, all of it to be written."""
    locks = Locks()
    memory = HostMemory(nbytes, locks)
    address = memory.tensor.data_ptr()
    assert locks.held == {address: nbytes}
    assert address % mmap.PAGESIZE == 0
    assert memory.nbytes == memory.tensor.numel() == nbytes
    assert memory.tensor.dtype == torch.uint8
    assert not memory.tensor.any()
    memory.tensor.fill_(7)
    assert memory.free() == nbytes
    assert not locks.held
    assert memory.free() == 0
    assert locks.unlocked == [address]


def test_memory_is_unlocked_before_it_is_gone() -> None:
    """By its owner's end too, while others look at it still."""
    locks = Locks(look=True)
    memory = HostMemory(MIB, locks)
    view = memory.tensor[5:]
    view.fill_(3)
    del memory
    gc.collect()
    assert not locks.held
    assert locks.seen == [0]
    assert bool(view.eq(3).all()), "what somebody refers to is there"
    again = HostMemory(MIB, locks)
    again.tensor.fill_(9)
    again.free()
    assert locks.seen == [0, 9]


def test_what_cannot_be_locked_is_not_held() -> None:
    """The error says how much it was, and why."""
    locks = Locks(most=MIB)
    kept = HostMemory(MIB, locks)
    with pytest.raises(
        HostMemoryError, match=r"1\.00 GiB of host memory cannot be page-locked: no"
    ):
        HostMemory(GIB, locks)
    assert locks.held == {kept.tensor.data_ptr(): MIB}


def test_what_the_host_has_not_is_said() -> None:
    locks = Locks()
    with pytest.raises(HostMemoryError, match="GiB of host memory cannot be allocated: "):
        HostMemory(1 << 60, locks)
    assert not locks.held


def test_what_stays_locked_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A device that has failed unlocks nothing, and nobody is stopped by it."""
    memory = HostMemory(MIB, Locks(broken=True))
    with caplog.at_level(logging.WARNING):
        assert memory.free() == MIB
    assert "1048576 bytes of host memory stay page-locked: the device has failed" in caplog.text


def test_a_cpus_memory_is_not_locked() -> None:
    assert registrar_for(torch.device("cpu")) is None
    assert isinstance(registrar_for(torch.device("cuda", 0)), DriverRegistrar)
    plain = HostMemory(MIB, None)
    plain.tensor.fill_(1)
    assert plain.free() == MIB
    locks = Locks()
    nothing = HostMemory(0, locks)
    assert nothing.tensor.numel() == nothing.free() == 0
    assert not locks.held


def test_a_driver_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the address, the bytes and a lock for all devices, behind what the device is at."""
    from tandem.memory import page_locked

    asked: list[tuple[object, ...]] = []

    def call(name: str, *words: ctypes.c_void_p) -> None:
        asked.append((name, *(each.value for each in words)))

    monkeypatch.setattr(page_locked, "call_driver", call)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(("behind", device)))
    device = torch.device("cuda", 1)
    registrar = DriverRegistrar(device)
    registrar.register(4096, 5)
    registrar.unregister(4096)
    assert asked == [
        ("behind", device),
        ("cuMemHostRegister_v2", 4096, 5, 1),
        ("behind", device),
        ("cuMemHostUnregister", 4096),
    ]
