"""Host memory that several processes of one machine see.

An anonymous file that each of them maps; gone with the last of them, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_ranges: dict[int, tuple[SharedMemory, int]] = {}
"""By address: what ``shared_tensor`` made and is still mapped."""


class SharedMemory:
    """``size`` bytes; ``descriptor`` is what another process maps."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Takes the descriptor over."""
        self.descriptor = descriptor
        self.size = size

    @classmethod
    def make(cls, size: int) -> SharedMemory:
        """New memory, all zero. Raises OSError where there is not as much."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("tandem-kv", os.MFD_CLOEXEC)
        else:
            descriptor, path = tempfile.mkstemp(prefix="tandem-kv-")
            os.unlink(path)
        os.ftruncate(descriptor, size)
        return cls(descriptor, size)

    def map(self, *, writable: bool = True) -> mmap.mmap:
        """All of it, mapped as long as anything refers to it."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(self.descriptor, self.size, prot=access)

    def tensor(self) -> Tensor:
        """All of it as a flat uint8 tensor, mapped as long as the tensor lives."""
        import torch

        return torch.frombuffer(self.map(), dtype=torch.uint8)

    def close(self) -> None:
        """Let go of the descriptor; mappings stay. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def shared_tensor(size: int) -> Tensor:
    """A ``SlabAllocator``: a flat uint8 tensor of ``size`` bytes, all zero, whose memory
    ``descriptor_of`` finds. Raises OSError where there is not as much."""
    import torch

    memory = SharedMemory.make(size)
    mapping = memory.map()
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    address = tensor.data_ptr()
    _ranges[address] = (memory, size)
    weakref.finalize(mapping, _forget, address)  # the tensor's storage holds the mapping
    return tensor


def descriptor_of(tensor: Tensor) -> tuple[int, int]:
    """A new descriptor of the memory that ``tensor`` begins, which the caller closes, and its
    bytes. Raises KeyError if ``shared_tensor`` did not make it."""
    memory, size = _ranges[tensor.data_ptr()]
    return os.dup(memory.descriptor), size


def _forget(address: int) -> None:
    memory, _ = _ranges.pop(address)
    memory.close()
