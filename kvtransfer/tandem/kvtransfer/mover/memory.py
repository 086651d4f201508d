"""The memory of send or receive slots: one tensor, a row per slot, header first."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from tandem.kernels.blocks import digest
from tandem.kvtransfer.mover.header import HEADER_BYTES

PAGE = mmap.PAGESIZE


def slot_bytes_for(wanted: int, block_bytes: int) -> int:
    """Bytes of a slot: what was asked for, at least one block and the header, in whole pages."""
    return -(-max(wanted, HEADER_BYTES + block_bytes) // PAGE) * PAGE


class SlotMemory:
    """``count`` slots of ``slot_bytes``, page-aligned, in host memory."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        raw = torch.empty(count * slot_bytes + PAGE, dtype=torch.uint8)
        skip = -raw.data_ptr() % PAGE
        self.rows: Tensor = raw[skip : skip + count * slot_bytes].view(count, slot_bytes)
        self._bytes: memoryview = self.rows.numpy().data.cast("B")
        self.digest(0, slot_bytes)  # the first one makes its tables: not at a request's expense

    @property
    def address(self) -> int:
        """Of slot 0."""
        return self.rows.data_ptr()

    def payload(self, slot: int, num_blocks: int, block_bytes: int) -> Tensor:
        """uint8 [num_blocks, block_bytes] behind the slot's header."""
        stop = HEADER_BYTES + num_blocks * block_bytes
        return self.rows[slot, HEADER_BYTES:stop].view(num_blocks, block_bytes)

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of a slot, writable."""
        start = slot * self.slot_bytes
        return self._bytes[start : start + nbytes]

    def digest(self, slot: int, nbytes: int) -> int:
        """Digest of the payload of a slot that holds ``nbytes`` in all."""
        return digest(self.rows[slot, HEADER_BYTES:nbytes])
