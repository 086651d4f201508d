"""Memory of workers in the agent, of the host or of GPUs: sources are read, rings written.

A source of the host is read through its descriptor, without a mapping: reading pages that its
owner never touched makes none. A ring of the host has to be touched by its owner, so that its
pages count as the owner's memory. It is sealed before that is checked, so that the owner cannot
take pages out later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Protocol

import torch

from tandem.kernels.memory import device
from tandem.kernels.memory.device import DeviceMemoryError, DeviceRange
from tandem.kernels.memory.lane import Lane
from tandem.kernels.memory.shared import SharedMemory
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.agent.wire import HOST, MAX_RING_BYTES
from tandem.kvtransfer.transports.mapped.batches import Batch
from tandem.kvtransfer.transports.mapped.copiers import Mark, Through


class Source(Protocol):
    """A range of a producer."""

    size: int

    def close(self) -> None:
        """Release it; no copy from it is under way. May be called twice."""
        ...


class Ring(Protocol):
    """The landing slots of a consumer."""

    size: int

    def copy(self, source: Source, batch: Batch) -> Mark:
        """Begin to copy between ranges that both have; return a mark after the copy. Raises
        TransportError, also if the two are of different kinds of memory. Some bytes may have
        been written then, but none are written later."""
        ...

    def close(self) -> None:
        """Release it; no copy into it is under way. May be called twice."""
        ...


class HostSource:
    """A range in memory of the host."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Keep a duplicate descriptor. Raises TransportError if it is not sealed memory of this
        size."""
        try:
            SharedMemory.given(descriptor, size)
        except OSError as error:
            raise TransportError(f"a producer's memory is refused: {error}") from error
        self.size = size
        self.descriptor = os.dup(descriptor)

    def close(self) -> None:
        """See Source."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class HostRing:
    """Landing slots in host memory, whose copies are done when ``copy`` returns."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Raises TransportError for what is not memory of this size, cannot be sealed or has a page
        that its owner has not touched."""
        try:
            self._mapping: mmap.mmap = SharedMemory.lent(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"landing slots cannot be mapped: {error}") from error
        self.size = size
        self._bytes = memoryview(self._mapping)

    def copy(self, source: Source, batch: Batch) -> Mark:
        """See Ring."""
        if not isinstance(source, HostSource):
            raise TransportError("the producer's memory is a GPU's, the consumer's the host's")
        rows = (each.tolist() for each in batch.joined()[2:5])
        for place, offset, nbytes in zip(*rows, strict=True):
            done = 0
            while done < nbytes:
                rest = self._bytes[offset + done : offset + nbytes]
                try:
                    got = os.preadv(source.descriptor, [rest], place + done)
                except OSError as error:
                    raise TransportError(f"a producer's memory cannot be read: {error}") from error
                if not got:
                    raise TransportError("a producer's memory ends before its time")
                done += got
        return Through()

    def close(self) -> None:
        """See Ring."""
        self._bytes.release()
        self._mapping.close()


class DeviceSource:
    """A range in memory of a GPU, mapped for each GPU that copies from it as it first does."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Keeps a descriptor of its own."""
        self.size = size
        self._descriptor = os.dup(descriptor)
        self._mapped: dict[int, DeviceRange] = {}

    def seen_by(self, index: int) -> DeviceRange:
        """Map it for reads of that GPU. Raises DeviceMemoryError if the GPU cannot reach it."""
        if index not in self._mapped:
            self._mapped[index] = device.map_range(self._descriptor, self.size, index)
        return self._mapped[index]

    def close(self) -> None:
        """See Source."""
        for each in self._mapped.values():
            each.close()
        self._mapped.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class DeviceRing:
    """Landing slots in memory of a GPU, whose copy engines fill them on a stream of their own."""

    def __init__(self, descriptor: int, size: int, index: int) -> None:
        """Raises TransportError."""
        self._index = index
        try:
            device.use_device(index)
            self._range = device.map_range(descriptor, size, index, writable=True)
        except DeviceMemoryError as error:
            raise TransportError(f"landing slots cannot be mapped: {error}") from error
        self.size = size
        try:
            self._lane = Lane(index)
        except RuntimeError as error:
            self._range.close()
            raise TransportError(f"landing slots have no stream: {error}") from error

    def copy(self, source: Source, batch: Batch) -> Mark:
        """See Ring."""
        if not isinstance(source, DeviceSource):
            raise TransportError("the producer's memory is the host's, the consumer's a GPU's")
        joined = batch.joined()
        try:
            device.use_device(self._index)
            seen = source.seen_by(self._index)
            there = joined.sources + seen.address
            here = joined.targets + self._range.address
            self._lane.copy(here, there, joined.sizes, seen)
            return self._lane.mark()
        except DeviceMemoryError as error:
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed: it copies no more
                self._lane.wait()  # those that have begun: their slot is the consumer's again
            raise TransportError(str(error)) from error

    def close(self) -> None:
        """See Ring."""
        self._range.close()


def open_source(where: str, descriptor: int, size: int) -> Source:
    """Open a producer's range; the descriptor stays the caller's. Raises TransportError."""
    if where == HOST:
        return HostSource(descriptor, size)
    _index_of(where)
    _check_device_memory(descriptor)
    return DeviceSource(descriptor, size)


def open_ring(where: str, descriptor: int, size: int) -> Ring:
    """Open a consumer's landing slots; the descriptor stays the caller's. Raises TransportError."""
    if size > MAX_RING_BYTES:
        raise TransportError(f"{size} bytes of landing slots; allowed: {MAX_RING_BYTES}")
    if where == HOST:
        return HostRing(descriptor, size)
    index = _index_of(where)
    _check_device_memory(descriptor)
    return DeviceRing(descriptor, size, index)


def _check_device_memory(descriptor: int) -> None:
    """Raise TransportError for what cannot be a descriptor of a GPU's memory."""
    try:
        device.check_descriptor(descriptor)
    except DeviceMemoryError as error:
        raise TransportError(str(error)) from error


def _index_of(where: str) -> int:
    """Return the number of a GPU in this process. Raises TransportError."""
    try:
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == where:
                return index
    except RuntimeError as error:  # counted without CUDA, which cannot be used
        raise TransportError(f"the agent cannot use its GPUs: {error}") from error
    raise TransportError(f"the agent does not see the GPU {where!r}")
