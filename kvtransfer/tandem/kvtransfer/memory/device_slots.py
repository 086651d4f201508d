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

from tandem.kernels.blocks import digest
from tandem.kernels.memory.device import MappedAllocator
from tandem.kvtransfer.memory.header import HEADER_BYTES
from tandem.kvtransfer.memory.packing import WHOLE, Packing
from tandem.kvtransfer.memory.slots import SlotMemory


class _OnStream(SlotMemory):
    """What it does runs on a stream of its own."""

    def __init__(self, count: int, slot_bytes: int, slab: Tensor) -> None:
        self._device = slab.device
        self._stream: Any = torch.cuda.Stream(slab.device)  # type: ignore[no-untyped-call]
        super().__init__(count, slot_bytes)
        if slot_bytes >= HEADER_BYTES + slab.shape[1]:  # else they are for patterns alone
            # Kernels are compiled and copies are set up now, not at a request's expense.
            self.pack(slab, [0], 0)
            self.unpack(0, [0], slab)

    def pack(
        self, slab: Tensor, block_ids: Sequence[int], slot: int, packing: Packing = WHOLE
    ) -> int:
        """See SlotMemory."""
        with self._own_stream():
            return super().pack(slab, block_ids, slot, packing)

    def unpack(
        self, slot: int, block_ids: Sequence[int], slab: Tensor, packing: Packing = WHOLE
    ) -> None:
        """See SlotMemory."""
        with self._own_stream():
            super().unpack(slot, block_ids, slab, packing)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


class HostSlotsOfDevice(_OnStream):
    """Slots in page-locked host memory, blocks on a GPU. Blocks are gathered, scattered and summed
    on the GPU, in a slot's length beside the slab: the host's processors touch no byte of them."""

    _pinned = True

    def __init__(self, count: int, slot_bytes: int, slab: Tensor) -> None:
        size = slot_bytes - HEADER_BYTES
        self._staging = torch.empty(size, dtype=torch.uint8, device=slab.device)
        self._staged: tuple[int, int] | None = None
        """Slot and bytes of the payload that was summed last: ``unpack`` takes the very bytes."""
        super().__init__(count, slot_bytes, slab)

    def pack(
        self, slab: Tensor, block_ids: Sequence[int], slot: int, packing: Packing = WHOLE
    ) -> int:
        """See SlotMemory."""
        self._staged = None
        with self._own_stream():
            payload = self._payload(slot, len(block_ids), packing.block_bytes(slab))
            staged = self._staging[: payload.numel()]
            ids = torch.tensor(block_ids, dtype=torch.int64)
            packing.pack(slab, ids, staged.view_as(payload))
            payload.copy_(staged.view_as(payload), non_blocking=True)
            return digest(staged)

    def unpack(
        self, slot: int, block_ids: Sequence[int], slab: Tensor, packing: Packing = WHOLE
    ) -> None:
        """See SlotMemory."""
        with self._own_stream():
            payload = self._payload(slot, len(block_ids), packing.block_bytes(slab))
            staged = self._staging[: payload.numel()].view_as(payload)
            if self._staged != (slot, payload.numel()):
                staged.copy_(payload, non_blocking=True)
            packing.unpack(staged, torch.tensor(block_ids, dtype=torch.int64), slab)
        self._staged = None

    def digest(self, slot: int, nbytes: int) -> int:
        """See SlotMemory."""
        with self._own_stream():
            payload = self.rows[slot, HEADER_BYTES:nbytes]
            staged = self._staging[: payload.numel()]
            staged.copy_(payload, non_blocking=True)
            self._staged = slot, payload.numel()
            return digest(staged)


class DeviceSlots(_OnStream):
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
