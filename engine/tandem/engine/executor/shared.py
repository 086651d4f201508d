"""Memory that several processes of one machine see: a rank's slab on a CPU, beside its engine's.

An anonymous file that each of them maps; gone with the last of them, however it ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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

    def tensor(self) -> Tensor:
        """All of it as a flat uint8 tensor, mapped as long as the tensor lives."""
        import torch

        return torch.frombuffer(mmap.mmap(self.descriptor, self.size), dtype=torch.uint8)

    def close(self) -> None:
        """Let go of the descriptor; mappings stay. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
