"""Memory of send or receive slots: one tensor, a row per slot, header first.

Slots of a GPU are in ``device_slots``; ``mover/make_slots`` chooses. Work may be queued on a
device: the caller polls until it is done.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.kernels.blocks import digest
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.packing import (
    HEADER_BYTES,
    WHOLE,
    Header,
    Packing,
    header_bytes,
)
from tandem.memory.shared import shared_tensor

PAGE = mmap.PAGESIZE
HOST_SLOT_BYTES = 4 << 20
HOST_CREDITS = 4
STAGED_SLOT_BYTES = 32 << 20
GPU_SLOT_BYTES = 128 << 20
GPU_CREDITS = 6
GPU_SHARE = 64
"""Divisor of the GPU memory for a worker's slots."""


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Sizes of one worker's slots that follow from its settings."""

    slot_bytes: int
    credits: int


def slot_bytes_for(wanted: int, block_bytes: int) -> int:
    """Return the bytes of a slot: ``wanted``, at least one block and the header, in whole pages."""
    return -(-max(wanted, HEADER_BYTES + block_bytes) // PAGE) * PAGE


def slot_sizes(
    config: KVTransferConfig,
    block_bytes: int,
    *,
    count: int,
    gpu_bytes: int | None,
    staged: bool = False,
) -> SlotSizes:
    """Return the sizes of ``count`` slots for blocks of ``block_bytes``. ``gpu_bytes`` is the
    memory of the slots' GPU, None for host memory. ``staged``: the blocks are on a GPU."""
    if gpu_bytes is None:
        wanted, ahead = STAGED_SLOT_BYTES if staged else HOST_SLOT_BYTES, HOST_CREDITS
    else:
        wanted, ahead = min(GPU_SLOT_BYTES, gpu_bytes // GPU_SHARE // count), GPU_CREDITS
    if config.kv_slot_bytes is not None:
        wanted = config.kv_slot_bytes
    return SlotSizes(slot_bytes_for(wanted, block_bytes), config.kv_credits or ahead)


class Move(Protocol):
    """Filling or emptying of a slot."""

    def done(self) -> bool:
        """Return whether all its bytes are in place. Never blocks."""
        ...


class Found(NamedTuple):
    """Header and digest found in a slot."""

    header: bytes
    digest: int
    """Digest of the payload, computed here by the host or the device."""


class Inspection(Move, Protocol):
    """Inspection of a slot."""

    def found(self) -> Found:
        """Return the slot's header and digest; valid once it is done."""
        ...


class Moved:
    """A move that is done."""

    def done(self) -> bool:
        return True


class Inspected(Moved):
    """An inspection that is done."""

    def __init__(self, found: Found) -> None:
        self._found = found

    def found(self) -> Found:
        return self._found


class SlotMemory:
    """``count`` slots of ``slot_bytes``, page-aligned, in host memory."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self.rows = self._allocate(count, slot_bytes)
        digest(self.rows[0])  # the first digest makes tables

    @property
    def _pinned(self) -> bool:
        return False

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        size = count * slot_bytes + PAGE
        raw = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        skip = -raw.data_ptr() % PAGE
        rows = raw[skip : skip + count * slot_bytes].view(count, slot_bytes)
        self._bytes: memoryview = rows.numpy().data.cast("B")
        return rows

    @property
    def address(self) -> int:
        return self.rows.data_ptr()

    @property
    def gpu(self) -> int | None:
        """Return the number of the slots' GPU; None is the host."""
        return None

    def view(self, slot: int, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` of a slot, writable. Only for host memory."""
        return self.span(slot * self.slot_bytes, nbytes)

    def span(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` from ``offset`` after slot 0's start, writable. Only for host
        memory."""
        return self._bytes[offset : offset + nbytes]

    def is_within_a_slot(self, offset: int, nbytes: int) -> bool:
        """Return whether these bytes belong to one slot; peers may request no others."""
        slot, rest = divmod(offset, self.slot_bytes)
        return 0 <= slot < self.count and 0 < nbytes <= self.slot_bytes - rest

    def read(self, slot: int, nbytes: int) -> bytes:
        return bytes(self.view(slot, nbytes))

    def write(self, slot: int, data: bytes) -> None:
        self.view(slot, len(data))[:] = data

    def pack(
        self,
        kv_cache: Tensor,
        block_ids: Sequence[int],
        slot: int,
        header: Header,
        packing: Packing = WHOLE,
    ) -> Move:
        """Gather blocks of ``kv_cache`` (uint8 [num_blocks, block_bytes]) into a slot after this
        header, whose digest is set. ``block_ids`` are as ``packing`` takes them. The slot has no
        header meanwhile, so that a late read fails."""
        self.write(slot, bytes(HEADER_BYTES))
        payload = self._payload(slot, len(block_ids), packing.block_bytes(kv_cache))
        packing.pack(kv_cache, torch.tensor(block_ids, dtype=torch.int64), payload)
        self.write(slot, header_bytes(header._replace(digest=digest(payload))))
        return Moved()

    def inspect(self, slot: int, nbytes: int) -> Inspection:
        """Read a slot's header, and compute the digest of its payload; ``nbytes`` count both."""
        payload = self.rows[slot, HEADER_BYTES:nbytes]
        return Inspected(Found(self.read(slot, HEADER_BYTES), digest(payload)))

    def unpack(
        self, slot: int, block_ids: Sequence[int], kv_cache: Tensor, packing: Packing = WHOLE
    ) -> Move:
        """Scatter a slot's verified payload into blocks of ``kv_cache``."""
        payload = self._payload(slot, len(block_ids), packing.block_bytes(kv_cache))
        packing.unpack(payload, torch.tensor(block_ids, dtype=torch.int64), kv_cache)
        return Moved()

    def mark(self) -> Move:
        """Return a move that is done when all begun work is, also of a pack or an unpack that
        raised."""
        return Moved()

    def settle(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for queued work; return whether memory may be freed."""
        return True

    def _payload(self, slot: int, num_blocks: int, block_bytes: int) -> Tensor:
        """Return uint8 [num_blocks, block_bytes] after the slot's header."""
        stop = HEADER_BYTES + num_blocks * block_bytes
        return self.rows[slot, HEADER_BYTES:stop].view(num_blocks, block_bytes)


class SharedSlots(SlotMemory):
    """Slots in host memory that other processes can map."""

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        rows = shared_tensor(count * slot_bytes).view(count, slot_bytes)
        self._bytes = rows.numpy().data.cast("B")
        return rows
