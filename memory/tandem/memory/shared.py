"""Host memory that several processes of one machine share.

An anonymous file that each of them maps; freed with the last of them, however it ends. If the
system can, it is sealed: no holder of a descriptor can change its size under the others' mappings,
whose next access would kill them. Once it has been shared to be read, no holder can write it, map
it to be written, punch holes into it or change its seals. Memory of another process is checked for
the same seals before it is used.
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
"""Constants of linux/fcntl.h; Python has not all of them."""
_SHARED = _SEAL | _SHRINK | _GROW | _FUTURE_WRITE
"""Seals of memory that another process reads or writes."""
_STAT_BLOCK = 512
_ranges: dict[int, tuple[SharedMemory, int]] = {}
"""Ranges that ``shared_tensor`` made and that are still mapped, by address."""


class SharedMemory:
    """``size`` bytes; ``descriptor`` is what another process maps."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Take the descriptor over."""
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
        """Return memory that another process made to be read; the descriptor stays the caller's.
        Raises OSError if it is not such memory, has another size or lacks a seal."""
        _check(descriptor, size)
        _check_seals(descriptor)
        return cls(descriptor, size)

    @classmethod
    def lent(cls, descriptor: int, size: int) -> mmap.mmap:
        """Map memory that another process made to be written by this one. The descriptor stays the
        caller's. The memory is sealed first, so that its pages stay those that its owner has
        touched: no write here makes a page, whatever the owner does later. Raises OSError if it is
        not such memory, has another size, cannot be sealed or has a page that was not touched."""
        _check(descriptor, size)
        mapping = cls(descriptor, size).map()  # before the seal, which forbids it
        try:
            _seal(descriptor, _SHARED)
            _check_seals(descriptor)
            check_touched(descriptor, size)  # after the seal: holes cannot be made any more
        except OSError:
            mapping.close()
            raise
        return mapping

    def share(self, *, writable: bool = False) -> int:
        """Return a new descriptor for other processes, which the caller closes. They may only read,
        unless the memory is theirs to write, too. They seal it then."""
        if not writable:
            _seal(self.descriptor, _SHARED)
        return os.dup(self.descriptor)

    def map(self, *, writable: bool = True) -> mmap.mmap:
        """Return all of it, mapped as long as anything refers to it."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(self.descriptor, self.size, prot=access)

    def tensor(self) -> Tensor:
        """Return all of it as a flat uint8 tensor, mapped as long as the tensor lives."""
        import torch

        return torch.frombuffer(self.map(), dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; mappings stay. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def shared_tensor(size: int) -> Tensor:
    """Return a flat uint8 tensor of ``size`` bytes, all zero, whose memory ``descriptor_of`` finds.
    A ``KVCacheAllocator``. Raises OSError if there is not enough memory."""
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
    """Return a new descriptor of the memory that ``tensor`` begins, and its bytes. The caller
    closes it. Its receiver may write if ``writable``. Raises KeyError if ``shared_tensor`` did not
    make the tensor."""
    memory, size = _ranges[tensor.data_ptr()]
    return memory.share(writable=writable), size


def check_touched(descriptor: int, size: int) -> None:
    """Raise OSError unless each page of sealed memory exists: reading it makes none."""
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
    """Raise OSError if a holder of the descriptor could still change it; only memory has seals."""
    if not _SEALED:
        return
    missing = _SHARED & ~fcntl.fcntl(descriptor, _GET_SEALS)
    if missing & (_SHRINK | _GROW):
        raise OSError("its size is not sealed")
    if missing:
        raise OSError("its bytes or its seals are not sealed")


def _seal(descriptor: int, seals: int) -> None:
    """Seal the memory, as far as the system has seals."""
    if _SEALED:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _ADD_SEALS, seals)


def _forget(address: int, memory: SharedMemory) -> None:
    """Forget a mapping that has gone: its addresses may be another's by now."""
    if address in _ranges and _ranges[address][0] is memory:
        del _ranges[address]
    memory.close()
