"""Slots for a slab in GPU memory: on the GPU itself, or on the host where a transport needs that.

Everything runs on a stream of its own, beside the engine's steps, and is waited for before it is
said to be done: what the transfer thread announces is there. Made by ``make_slots``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.memory.device import MappedAllocator
from tandem.kvtransfer.memory.slots import SlotMemory


class HostSlotsOfDevice(SlotMemory):
    """Slots in host memory, blocks on a GPU: the copy engines carry whole blocks."""

    def __init__(self, count: int, slot_bytes: int, slab: Tensor) -> None:
        self._device = slab.device
        self._stream: Any = torch.cuda.Stream(slab.device)  # type: ignore[no-untyped-call]
        super().__init__(count, slot_bytes)
        # Kernels are compiled and copies are set up now, not at a request's expense.
        self.pack(slab, [0], 0)
        self.unpack(0, [0], slab)

    def pack(self, slab: Tensor, block_ids: Sequence[int], slot: int) -> int:
        """See SlotMemory."""
        with self._own_stream():
            return super().pack(slab, block_ids, slot)

    def unpack(self, slot: int, block_ids: Sequence[int], slab: Tensor) -> None:
        """See SlotMemory."""
        with self._own_stream():
            super().unpack(slot, block_ids, slab)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


class DeviceSlots(HostSlotsOfDevice):
    """Slots beside the slab, in memory that other processes can open (``cudaMalloc``'s)."""

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        with self._own_stream():
            return torch.zeros((count, slot_bytes), dtype=torch.uint8, device=self._device)

    @property
    def gpu(self) -> int | None:
        """See SlotMemory."""
        return self._device.index

    def view(self, slot: int, nbytes: int) -> memoryview:
        """Never called: transports of host memory get slots there."""
        raise AssertionError("slots in GPU memory have no host address")

    def read(self, slot: int, nbytes: int) -> bytes:
        """See SlotMemory."""
        with self._own_stream():
            return self.rows[slot, :nbytes].cpu().numpy().tobytes()

    def write(self, slot: int, data: bytes) -> None:
        """See SlotMemory."""
        with self._own_stream():
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.rows[slot, : len(data)].copy_(source)

    def digest(self, slot: int, nbytes: int) -> int:
        """See SlotMemory."""
        with self._own_stream():
            return super().digest(slot, nbytes)


class MappedSlots(DeviceSlots):
    """Slots beside the slab, in memory that other processes map by a descriptor."""

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        with self._own_stream():
            memory = MappedAllocator(self._device)(count * slot_bytes)
            return memory[: count * slot_bytes].zero_().view(count, slot_bytes)
