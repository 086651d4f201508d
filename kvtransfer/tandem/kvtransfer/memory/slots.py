"""The memory of send or receive slots: one tensor, a row per slot, header first.

In host memory here; ``device_slots`` has the same in a GPU's, and ``mover/make_slots`` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.blocks import digest
from tandem.kernels.memory.shared import shared_tensor
from tandem.kvtransfer.memory.header import HEADER_BYTES
from tandem.kvtransfer.memory.packing import WHOLE, Packing
from tandem.kvtransfer.memory.sizes import PAGE


class SlotMemory:
    """``count`` slots of ``slot_bytes``, page-aligned, in host memory."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self.rows = self._allocate(count, slot_bytes)
        self.digest(0, slot_bytes)  # the first one makes its tables: not at a request's expense

    _pinned = False
    """Whether a GPU's copies reach the slots without help of the processor."""

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        size = count * slot_bytes + PAGE
        raw = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        skip = -raw.data_ptr() % PAGE
        rows = raw[skip : skip + count * slot_bytes].view(count, slot_bytes)
        self._bytes: memoryview = rows.numpy().data.cast("B")
        return rows

    @property
    def address(self) -> int:
        """Of slot 0."""
        return self.rows.data_ptr()

    @property
    def gpu(self) -> int | None:
        """Number of the GPU that holds the slots; None is the host."""
        return None

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of a slot, writable; of host memory alone."""
        return self.span(slot * self.slot_bytes, nbytes)

    def span(self, offset: int, nbytes: int) -> memoryview:
        """``nbytes`` from ``offset`` bytes behind slot 0 on, writable; of host memory alone."""
        return self._bytes[offset : offset + nbytes]

    def is_within_a_slot(self, offset: int, nbytes: int) -> bool:
        """Whether these bytes belong to one slot: all that peers may ask for."""
        slot, rest = divmod(offset, self.slot_bytes)
        return 0 <= slot < self.count and 0 < nbytes <= self.slot_bytes - rest

    def read(self, slot: int, nbytes: int) -> bytes:
        """A copy of the first ``nbytes`` of a slot."""
        return bytes(self.view(slot, nbytes))

    def write(self, slot: int, data: bytes) -> None:
        """Overwrite the start of a slot."""
        self.view(slot, len(data))[:] = data

    def pack(
        self, slab: Tensor, block_ids: Sequence[int], slot: int, packing: Packing = WHOLE
    ) -> int:
        """Gather blocks of ``slab`` (uint8 [num_blocks, block_bytes]) into a slot's payload, and
        return its digest; done when this returns. ``block_ids`` are those that ``packing`` goes by.
        The slot has no header meanwhile: whoever reads it too late reads no part."""
        self.write(slot, bytes(HEADER_BYTES))
        payload = self._payload(slot, len(block_ids), packing.block_bytes(slab))
        packing.pack(slab, torch.tensor(block_ids, dtype=torch.int64), payload)
        return digest(payload)

    def unpack(
        self, slot: int, block_ids: Sequence[int], slab: Tensor, packing: Packing = WHOLE
    ) -> None:
        """Scatter a slot's payload into blocks of ``slab``; done when this returns."""
        payload = self._payload(slot, len(block_ids), packing.block_bytes(slab))
        packing.unpack(payload, torch.tensor(block_ids, dtype=torch.int64), slab)

    def digest(self, slot: int, nbytes: int) -> int:
        """Digest of the payload of a slot that holds ``nbytes`` in all."""
        return digest(self.rows[slot, HEADER_BYTES:nbytes])

    def _payload(self, slot: int, num_blocks: int, block_bytes: int) -> Tensor:
        """uint8 [num_blocks, block_bytes] behind the slot's header."""
        stop = HEADER_BYTES + num_blocks * block_bytes
        return self.rows[slot, HEADER_BYTES:stop].view(num_blocks, block_bytes)


class SharedSlots(SlotMemory):
    """Slots in host memory that other processes can map."""

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        rows = shared_tensor(count * slot_bytes).view(count, slot_bytes)
        self._bytes = rows.numpy().data.cast("B")
        return rows
