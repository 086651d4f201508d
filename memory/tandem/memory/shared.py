"""Host memory that several processes of one machine share: an anonymous file, freed with the last.

Seals prevent that a holder of a descriptor changes the size, which would kill other processes at
their next access. Memory shared for reading is also sealed against writes, maps for writing and
holes. Another process's memory must have these seals.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import tempfile
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SEALED = hasattr(os, "memfd_create")
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
"""Constants of linux/fcntl.h that Python lacks in part."""
_SHARED = _SEAL | _SHRINK | _GROW | _FUTURE_WRITE
"""Seals of memory that another process reads or writes."""
_STAT_BLOCK = 512
_ranges: dict[int, tuple[SharedMemory, int]] = {}
"""Mapped ranges of ``shared_tensor``, by address."""


class SharedMemory:
    """``size`` bytes behind ``descriptor``, which other processes map."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size

    @classmethod
    def make(cls, size: int) -> SharedMemory:
        """Return new memory, all zero. Raises OSError if there is not enough."""
        if _SEALED:
            descriptor = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            descriptor, path = tempfile.mkstemp(prefix="tandem-kv-")
            os.unlink(path)
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        _seal(descriptor, _SHRINK | _GROW)
        return cls(descriptor, size)

    @classmethod
    def given(cls, descriptor: int, size: int) -> SharedMemory:
        """Return another process's readable memory; the caller keeps the descriptor. Raises OSError
        if it is of another kind or size, or lacks a seal."""
        _check(descriptor, size)
        _check_seals(descriptor)
        return cls(descriptor, size)

    @classmethod
    def lent(cls, descriptor: int, size: int) -> mmap.mmap:
        """Map another process's memory for writing, sealed so that its pages stay those it has. The
        caller keeps the descriptor. Raises OSError if kind or size differ, or a page is missing."""
        _check(descriptor, size)
        mapping = cls(descriptor, size).map()  # before the seal, which forbids it
        try:
            _seal(descriptor, _SHARED)
            _check_seals(descriptor)
            check_touched(descriptor, size)  # after the seal: no holes can be made any more
        except OSError:
            mapping.close()
            raise
        return mapping

    def share(self, *, writable: bool = False) -> int:
        """Return a new descriptor for other processes, which the caller closes. They may write only
        if ``writable``."""
        if not writable:
            _seal(self.descriptor, _SHARED)
        return os.dup(self.descriptor)

    def map(self, *, writable: bool = True) -> mmap.mmap:
        """Map the whole memory. It stays mapped as long as a reference exists."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(self.descriptor, self.size, prot=access)

    def tensor(self) -> Tensor:
        """Return the whole memory as a flat uint8 tensor, mapped as long as the tensor exists."""
        import torch

        return torch.frombuffer(self.map(), dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; mappings stay. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def shared_tensor(size: int) -> Tensor:
    """Return a flat zero uint8 tensor; ``descriptor_of`` finds its memory. A ``KVCacheAllocator``.
    Raises OSError if there is not enough memory."""
    import torch

    memory = SharedMemory.make(size)
    try:
        mapping = memory.map()
    except OSError:
        memory.close()
        raise
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    address = tensor.data_ptr()
    _ranges[address] = (memory, size)
    weakref.finalize(mapping, _forget, address, memory)  # the tensor's storage holds the mapping
    return tensor


def descriptor_of(tensor: Tensor, *, writable: bool = False) -> tuple[int, int]:
    """Return a new descriptor of a tensor's memory, which the caller closes, and its bytes. Raises
    KeyError if ``shared_tensor`` did not make it."""
    memory, size = _ranges[tensor.data_ptr()]
    return memory.share(writable=writable), size


def check_touched(descriptor: int, size: int) -> None:
    """Raise OSError unless each page of sealed memory exists: reading one makes none."""
    if _SEALED and os.fstat(descriptor).st_blocks * _STAT_BLOCK < size:
        raise OSError("it has pages that its owner has not touched")


def _check(descriptor: int, size: int) -> None:
    """Raise OSError unless this is anonymous memory of exactly this size."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is not memory")
    if found.st_size != size:
        raise OSError(f"it has {found.st_size} bytes, not {size}")


def _check_seals(descriptor: int) -> None:
    """Raise OSError if a holder of the descriptor could still change the memory."""
    if not _SEALED:
        return
    missing = _SHARED & ~fcntl.fcntl(descriptor, _GET_SEALS)
    if missing & (_SHRINK | _GROW):
        raise OSError("its size is not sealed")
    if missing:
        raise OSError("its bytes or its seals are not sealed")


def _seal(descriptor: int, seals: int) -> None:
    if _SEALED:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _ADD_SEALS, seals)


def _forget(address: int, memory: SharedMemory) -> None:
    if address in _ranges and _ranges[address][0] is memory:
        del _ranges[address]
    memory.close()
