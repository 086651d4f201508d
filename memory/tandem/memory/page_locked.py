"""Page-locked host memory for a GPU's copies, of an exact size.

torch's ``pin_memory`` rounds up to a power of two and never returns the memory to the system.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from tandem.memory.device import DeviceMemoryError, call_driver
from tandem.protocol.errors import TandemError

_DONTNEED, _REMOVE = 4, 9
"""MADV_DONTNEED for private memory, MADV_REMOVE for shared memory."""


def give_back(tensor: Tensor) -> int:
    """Return the whole pages of a dense host tensor to the system; return their bytes.

    The pages are zero then. Raises TandemError if the system refuses, also for memory that
    ``shared.SharedMemory.share`` sealed.
    """
    assert tensor.is_contiguous(), "pages are given back of dense memory"
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end <= begin:
        return 0
    failed = _advise_range(begin, end - begin, _REMOVE)
    if failed == errno.EPERM:
        raise TandemError("the memory is shared with other processes, which may read it")
    if failed:  # not shared memory
        failed = _advise_range(begin, end - begin, _DONTNEED)
    if failed:
        raise TandemError(f"the system keeps the pages: {os.strerror(failed)}")
    return end - begin


def _advise_range(address: int, size: int, advice: int) -> int:
    """Return the error's number; 0 for success."""
    status = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice))
    return ctypes.get_errno() if status else 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


logger = logging.getLogger(__name__)

_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: for every device of the process."""
GIB = 2**30


class HostMemoryError(TandemError):
    """The host has not enough memory, or its pages cannot be locked; the text names the cause."""


class Registrar(Protocol):
    """Interface that locks pages for a device's copies."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock the pages. Raises DeviceMemoryError."""
        ...

    def unregister(self, address: int) -> None:
        """Unlock the pages after the copies under way. Raises DeviceMemoryError, RuntimeError if
        the device has failed."""
        ...


class DriverRegistrar:
    """Registrar of a GPU's driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        torch.cuda.synchronize(self._device)  # makes the device's context current in this thread
        where, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        call_driver("cuMemHostRegister_v2", where, size, ctypes.c_uint(_PORTABLE))

    def unregister(self, address: int) -> None:
        torch.cuda.synchronize(self._device)
        call_driver("cuMemHostUnregister", ctypes.c_void_p(address))


def registrar_for(device: torch.device) -> Registrar | None:
    """Return the registrar for copies of ``device``; None if pages need not be locked."""
    return DriverRegistrar(device) if device.type == "cuda" else None


class HostMemory:
    """Host memory, locked if there is a registrar, until ``free`` or its owner's end."""

    def __init__(self, nbytes: int, registrar: Registrar | None) -> None:
        """Allocate ``nbytes``. Raises HostMemoryError."""
        self.nbytes = nbytes
        self.tensor: Tensor = torch.empty(0, dtype=torch.uint8)
        """Flat uint8 [nbytes], zero at first; invalid after ``free``."""
        self._release: weakref.finalize[..., HostMemory] | None = None
        if not nbytes:
            return
        shown = f"{nbytes / GIB:.2f} GiB of host memory"
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostMemoryError(f"{shown} cannot be allocated: {error.strerror}") from error
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        if registrar is not None:
            _advise(mapping)
            try:
                registrar.register(tensor.data_ptr(), nbytes)
            except DeviceMemoryError as error:
                raise HostMemoryError(f"{shown} cannot be page-locked: {error}") from error
            release = weakref.finalize(self, _unlock, registrar, tensor.data_ptr(), mapping)
            release.atexit = False  # the process's end unlocks all
            self._release = release
        self.tensor = tensor

    def free(self) -> int:
        """Unlock and free the memory once no tensor refers to it; return its bytes. May be called
        twice."""
        if self._release is not None:
            self._release()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes


def _advise(mapping: mmap.mmap) -> None:
    """Keep the pages from forks and ask for huge ones; the system may know neither advice."""
    for name in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        advice = getattr(mmap, name, None)
        if advice is not None:
            with suppress(OSError):
                mapping.madvise(advice)


def _unlock(registrar: Registrar, address: int, mapping: mmap.mmap) -> None:
    """Unlock the pages; the argument keeps ``mapping`` alive until then."""
    try:
        registrar.unregister(address)
    except (DeviceMemoryError, RuntimeError) as error:
        logger.warning("%d bytes of host memory stay page-locked: %s", len(mapping), error)
