"""Slots for a KV cache in GPU memory: on the GPU itself, or on the host if a transport needs that.

Packing and unpacking are queued on their own stream; the transfer thread polls an event. Made by
``make_slots``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.kernels.blocks import add_digest
from tandem.kvtransfer.memory.packing import (
    DIGEST_AT,
    DIGEST_BYTES,
    HEADER_BYTES,
    NOBODYS,
    SEEN_AT,
    WHOLE,
    Header,
    Packing,
    digest_at,
    header_bytes,
)
from tandem.kvtransfer.memory.slots import (
    Found,
    Inspection,
    Move,
    SlotMemory,
)
from tandem.memory.device import MappedAllocator
from tandem.protocol.card import DTYPE_BYTES

LOOK_SECONDS = 0.001


class DeviceStream:
    """Stream of a device; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def queue(self) -> Iterator[None]:
        with torch.cuda.device(self._device):  # torch's own context of a stream is slower
            before = torch.cuda.current_stream(self._device)
            torch.cuda.set_stream(self._stream)
            try:
                yield
            finally:
                torch.cuda.set_stream(before)

    def mark(self) -> _Mark:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Mark(event)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait by polling if ``seconds`` are given: a stream's own wait has no deadline."""
        if seconds is None:
            self._stream.synchronize()
            return True
        mark, end = self.mark(), time.monotonic() + seconds
        while not mark.done():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return True


class _Mark:
    """An event after the queued work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """Return whether the device has reached the event. Raises the device's error."""
        return bool(self._event.query())


_STAGES = 3
"""Parts between host and KV cache that may be under way without another copy."""
_MOST_NARROWED = max(DTYPE_BYTES.values())
"""Blocks as fp8 that a slot holds for each block as it is, at most."""


class Stream(Protocol):
    """Queue of a device's work, in order."""

    def queue(self) -> AbstractContextManager[None]:
        """Queue the calls of the block here."""
        ...

    def mark(self) -> Move:
        """Return a move that is done when all queued work is."""
        ...

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for all queued work, at most ``seconds`` if given; return whether it is done."""
        ...


class _OnStream(SlotMemory):
    """Slots whose work is queued on their own stream."""

    def __init__(
        self, count: int, slot_bytes: int, kv_cache: Tensor, stream: Stream | None = None
    ) -> None:
        self._device = kv_cache.device
        self._stream = DeviceStream(kv_cache.device) if stream is None else stream
        super().__init__(count, slot_bytes)
        if slot_bytes >= HEADER_BYTES + kv_cache.shape[1]:  # else they are for patterns only
            # Compile kernels and set up copies before the first request.
            self.pack(kv_cache, [0], 0, NOBODYS)
            self.inspect(0, HEADER_BYTES + kv_cache.shape[1])
            self.unpack(0, [0], kv_cache)
            self._stream.wait()
            self.write(0, bytes(HEADER_BYTES))

    def mark(self) -> Move:
        return self._stream.mark()

    def settle(self, seconds: float) -> bool:
        return self._stream.wait(seconds)

    @property
    def _pinned(self) -> bool:
        return self._device.type == "cuda"

    def _digest_of(self, slot: int, at: int) -> Tensor:
        """Return one of the digests in a slot's header, int64 [1]."""
        return self.rows[slot, at : at + DIGEST_BYTES].view(torch.int64)


class HostSlotsOfDevice(_OnStream):
    """Slots in page-locked host memory for blocks on a GPU. The GPU gathers, scatters and sums
    blocks in stages next to the KV cache."""

    def __init__(
        self, count: int, slot_bytes: int, kv_cache: Tensor, stream: Stream | None = None
    ) -> None:
        size = slot_bytes - HEADER_BYTES
        self._stages = torch.empty((_STAGES, size), dtype=torch.uint8, device=kv_cache.device)
        self._staged: dict[int, int] = {}
        """Stage with the payload of a summed slot, if not reused."""
        self._next = 0
        self._sum = torch.empty(1, dtype=torch.int64, device=kv_cache.device)
        super().__init__(count, slot_bytes, kv_cache, stream)

    def pack(
        self,
        kv_cache: Tensor,
        block_ids: Sequence[int],
        slot: int,
        header: Header,
        packing: Packing = WHOLE,
    ) -> Move:
        """Write the header's fields after the rest."""
        self.write(slot, bytes(HEADER_BYTES))
        with self._stream.queue():
            payload = self._payload(slot, len(block_ids), packing.block_bytes(kv_cache))
            staged = self._stage(slot, payload.numel()).view_as(payload)
            packing.pack(kv_cache, torch.tensor(block_ids, dtype=torch.int64), staged)
            payload.copy_(staged, non_blocking=True)
            add_digest(staged, self._sum.zero_())
            self._digest_of(slot, DIGEST_AT).copy_(self._sum, non_blocking=True)
        return _Signed(self._stream.mark(), self.view(slot, DIGEST_AT), header)

    def inspect(self, slot: int, nbytes: int) -> Inspection:
        with self._stream.queue():
            payload = self.rows[slot, HEADER_BYTES:nbytes]
            staged = self._stage(slot, len(payload))
            staged.copy_(payload, non_blocking=True)
            add_digest(staged, self._sum.zero_())
            self._digest_of(slot, SEEN_AT).copy_(self._sum, non_blocking=True)
        return _Read(self._stream.mark(), self.view(slot, HEADER_BYTES))

    def unpack(
        self, slot: int, block_ids: Sequence[int], kv_cache: Tensor, packing: Packing = WHOLE
    ) -> Move:
        """Read the stage in which the payload was summed, if it still has it."""
        with self._stream.queue():
            payload = self._payload(slot, len(block_ids), packing.block_bytes(kv_cache))
            at = self._staged.pop(slot, None)
            if at is None:
                staged = self._stage(slot, payload.numel()).view_as(payload)
                staged.copy_(payload, non_blocking=True)
            else:
                staged = self._stages[at, : payload.numel()].view_as(payload)
            packing.unpack(staged, torch.tensor(block_ids, dtype=torch.int64), kv_cache)
        return self._stream.mark()

    def _stage(self, slot: int, nbytes: int) -> Tensor:
        at, self._next = self._next, (self._next + 1) % len(self._stages)
        self._staged = {each: stage for each, stage in self._staged.items() if stage != at}
        self._staged[slot] = at
        return self._stages[at, :nbytes]


class DeviceSlots(_OnStream):
    """Slots next to the KV cache, in memory that other processes can open (``cudaMalloc``'s)."""

    def __init__(
        self, count: int, slot_bytes: int, kv_cache: Tensor, stream: Stream | None = None
    ) -> None:
        pinned = kv_cache.device.type == "cuda"
        self._heads = torch.zeros((count, HEADER_BYTES), dtype=torch.uint8, pin_memory=pinned)
        """Header of each slot, on the host: to be written, or as read."""
        most = max(1, (slot_bytes - HEADER_BYTES) * _MOST_NARROWED // kv_cache.shape[1])
        self._ids = torch.empty((count, most), dtype=torch.int64, pin_memory=pinned)
        """Numbers of the packed or unpacked blocks of each slot, on the host."""
        self._ids_there = torch.empty((count, most), dtype=torch.int64, device=kv_cache.device)
        super().__init__(count, slot_bytes, kv_cache, stream)

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        with self._stream.queue():
            rows = torch.zeros((count, slot_bytes), dtype=torch.uint8, device=self._device)
        self._stream.wait()
        return rows

    @property
    def gpu(self) -> int | None:
        return self._device.index

    def view(self, slot: int, nbytes: int) -> memoryview:
        raise AssertionError("slots in GPU memory have no host address")

    def read(self, slot: int, nbytes: int) -> bytes:
        with self._stream.queue():
            return self.rows[slot, :nbytes].cpu().numpy().tobytes()

    def write(self, slot: int, data: bytes) -> None:
        with self._stream.queue():
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.rows[slot, : len(data)].copy_(source)

    def pack(
        self,
        kv_cache: Tensor,
        block_ids: Sequence[int],
        slot: int,
        header: Header,
        packing: Packing = WHOLE,
    ) -> Move:
        """Have the device write all of it, header and digest included."""
        staged = self._heads[slot]
        staged.numpy().data[:] = header_bytes(header)
        with self._stream.queue():
            head = self._head(slot)
            head.zero_()
            payload = self._payload(slot, len(block_ids), packing.block_bytes(kv_cache))
            packing.pack(kv_cache, self._numbers(slot, block_ids, packing), payload)
            head.copy_(staged, non_blocking=True)
            add_digest(payload, self._digest_of(slot, DIGEST_AT))
        return self._stream.mark()

    def inspect(self, slot: int, nbytes: int) -> Inspection:
        staged = self._heads[slot]
        with self._stream.queue():
            # Added to the zero that P wrote; any other value makes a wrong digest.
            add_digest(self.rows[slot, HEADER_BYTES:nbytes], self._digest_of(slot, SEEN_AT))
            staged.copy_(self._head(slot), non_blocking=True)
        return _Read(self._stream.mark(), staged.numpy().data)

    def unpack(
        self, slot: int, block_ids: Sequence[int], kv_cache: Tensor, packing: Packing = WHOLE
    ) -> Move:
        with self._stream.queue():
            payload = self._payload(slot, len(block_ids), packing.block_bytes(kv_cache))
            packing.unpack(payload, self._numbers(slot, block_ids, packing), kv_cache)
        return self._stream.mark()

    def _head(self, slot: int) -> Tensor:
        return self.rows[slot, :HEADER_BYTES]

    def _numbers(self, slot: int, block_ids: Sequence[int], packing: Packing) -> Tensor:
        """Return int64 [len(block_ids)]: on the device, or on the host if copies are queued one by
        one. The slot's place is free: its earlier copy has ended."""
        count = len(block_ids)
        if packing.one_by_one:
            return torch.tensor(block_ids, dtype=torch.int64)
        here, there = self._ids[slot, :count], self._ids_there[slot, :count]
        here.numpy()[:] = block_ids
        return there.copy_(here, non_blocking=True)


class MappedSlots(DeviceSlots):
    """Slots next to the KV cache, in memory that other processes map by a descriptor."""

    def _allocate(self, count: int, slot_bytes: int) -> Tensor:
        size = count * slot_bytes
        with self._stream.queue():
            rows = MappedAllocator(self._device)(size)[:size].zero_().view(count, slot_bytes)
        self._stream.wait()
        return rows


class _Signed:
    """A packed slot on the host whose header's fields are written last."""

    def __init__(self, mark: Move, place: memoryview, header: Header) -> None:
        """``place`` is the slot's start, up to the digest."""
        self._mark: Move | None = mark
        self._place = place
        self._header = header

    def done(self) -> bool:
        if self._mark is not None and self._mark.done():
            self._mark = None
            self._place[:] = header_bytes(self._header)[: len(self._place)]
        return self._mark is None


class _Read:
    """A slot whose header and sum are copied to the host."""

    def __init__(self, mark: Move, header: memoryview) -> None:
        self._mark = mark
        self._header = header

    def done(self) -> bool:
        return self._mark.done()

    def found(self) -> Found:
        header = bytes(self._header)
        return Found(header, digest_at(header, SEEN_AT))
