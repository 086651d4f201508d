"""Copiers from a peer's memory into this worker's: the copy engines of a GPU, or this thread."""

from __future__ import annotations

import math
import mmap
import threading
from typing import Protocol

import torch
from torch import Tensor

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.base import Region, Traits
from tandem.kvtransfer.transports.mapped.batches import Batch
from tandem.memory import device, shared
from tandem.memory.copies import Lane
from tandem.memory.device import DeviceMemoryError, DeviceRange


class Mark(Protocol):
    """A point in the order of copies."""

    @property
    def due(self) -> float:
        """Return when it is likely to come, by ``time.perf_counter``; inf if unknown."""
        ...

    def done(self) -> bool:
        """Return whether all copies before it are done."""
        ...


class Source(Protocol):
    """A range of a peer's memory, mapped to be read."""

    size: int

    def close(self) -> None:
        """Unmap; no copy from it is under way. May be called twice."""
        ...


class Copier(Protocol):
    """Copier, for the transfer thread, except ``share``."""

    at_once: int
    """Most extents of one read, which are reported together."""
    pieces: int
    """Most pieces of one block that is copied into blocks of another size."""

    def share(self, tensor: Tensor, *, writable: bool = False) -> tuple[int, int]:
        """Return a descriptor of a tensor's memory, which the caller closes, and its bytes. Other
        processes may write it if ``writable``. Raises TransportError if none can map it."""
        ...

    def where(self) -> str:
        """Return ``host``, or the UUID of the memory's GPU."""
        ...

    def make(self, size: int) -> tuple[Tensor, Source]:
        """Allocate at least ``size`` bytes of flat uint8, shareable, with each page touched. Return
        it also as a source, valid while the caller keeps the memory. Raises TransportError."""
        ...

    def map(self, descriptor: int, size: int) -> Source:
        """Map a peer's range; the descriptor stays the caller's. Raises TransportError."""
        ...

    def copy(self, target: Tensor, source: Source, batch: Batch) -> None:
        """Begin to copy a batch, which both have, from the source into ``target``, flat uint8.
        Raises TransportError."""
        ...

    def mark(self) -> Mark: ...


def traits_of(name: str, copier: Copier, *, on_gpu: bool, by_agent: bool) -> Traits:
    """Return the traits of a transport that copies by ``copier``. An agent does not cut blocks into
    those of another size."""
    return Traits(
        name=name,
        needs_advance=False,
        moves_gpu_memory=on_gpu,
        lands_in=Region.BLOCKS,
        fenced=True,
        max_extents=copier.at_once,
        max_pieces=1 if by_agent else copier.pieces,
        maps_memory=True,
        by_agent=by_agent,
    )


class Through:
    """Mark of copies that are done."""

    due = -math.inf

    def done(self) -> bool:
        return True


class _HostSource:
    """Host memory of another process, or of this one."""

    def __init__(self, view: memoryview, mapping: mmap.mmap | None = None) -> None:
        self.size = len(view)
        self._mapping = mapping
        self.bytes = view

    def close(self) -> None:
        self.bytes.release()
        if self._mapping is not None:
            self._mapping.close()


class HostCopier:
    """Copier of host memory, whose copies are done when ``copy`` returns and block the thread."""

    at_once = 16
    pieces = 1 << 16
    _seen: tuple[Tensor, memoryview] | None = None
    """Target of the last copy, and its bytes."""

    def share(self, tensor: Tensor, *, writable: bool = False) -> tuple[int, int]:
        try:
            return shared.descriptor_of(tensor, writable=writable)
        except KeyError as error:
            raise TransportError("the memory is not shared with other processes") from error
        except OSError as error:
            raise TransportError(f"the memory cannot be shared: {error}") from error

    def map(self, descriptor: int, size: int) -> _HostSource:
        try:
            mapping = shared.SharedMemory.given(descriptor, size).map(writable=False)
            return _HostSource(memoryview(mapping), mapping)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"a peer's memory cannot be mapped: {error}") from error

    def where(self) -> str:
        return "host"

    def make(self, size: int) -> tuple[Tensor, Source]:
        try:
            memory = shared.shared_tensor(size)
        except OSError as error:
            raise TransportError(f"no {size} bytes of memory to share: {error}") from error
        return memory.zero_(), _HostSource(memory.numpy().data.cast("B"))

    def copy(self, target: Tensor, source: Source, batch: Batch) -> None:
        assert isinstance(source, _HostSource)
        if self._seen is None or self._seen[0] is not target:
            self._seen = target, target.numpy().data.cast("B")
        bytes_here = self._seen[1]
        rows = (each.tolist() for each in (batch.targets, batch.sources, batch.sizes))
        for offset, at, nbytes in zip(*rows, strict=True):
            bytes_here[offset : offset + nbytes] = source.bytes[at : at + nbytes]

    def mark(self) -> Mark:
        return Through()


class CudaCopier:
    """Copier of GPU memory of one machine, by the copy engines on their own stream: they slow an
    engine's step less than a gather kernel."""

    at_once = pieces = 512

    def __init__(self, where: torch.device) -> None:
        """``where`` is the device of this worker's KV cache. Raises TransportError."""
        self._index = where.index if where.index is not None else torch.cuda.current_device()
        try:
            self._lane = Lane(self._index)
        except RuntimeError as error:  # the first streams of a process take memory of the device
            raise TransportError(f"KV is copied on a stream, and there is none: {error}") from error
        self._threads = threading.local()

    def share(self, tensor: Tensor, *, writable: bool = False) -> tuple[int, int]:
        """Share the tensor; a process with the descriptor may write regardless of ``writable``."""
        try:
            self._enter()
            return device.descriptor_of(tensor)
        except DeviceMemoryError as error:
            raise TransportError(f"the memory cannot be shared: {error}") from error

    def map(self, descriptor: int, size: int) -> DeviceRange:
        try:
            self._enter()
            return device.map_range(descriptor, size, self._index)
        except DeviceMemoryError as error:
            raise TransportError(f"a peer's GPU memory cannot be mapped: {error}") from error

    def where(self) -> str:
        return str(torch.cuda.get_device_properties(self._index).uuid)

    def make(self, size: int) -> tuple[Tensor, Source]:
        try:
            memory = device.MappedAllocator(torch.device("cuda", self._index))(size)
        except (DeviceMemoryError, RuntimeError) as error:
            raise TransportError(f"no {size} bytes of GPU memory to share: {error}") from error
        return memory, DeviceRange(memory.data_ptr(), memory.numel(), 0)

    def copy(self, target: Tensor, source: Source, batch: Batch) -> None:
        assert isinstance(source, DeviceRange)
        here, there = batch.targets + target.data_ptr(), batch.sources + source.address
        try:
            self._enter()
            self._lane.copy(here, there, batch.sizes, source)
        except DeviceMemoryError as error:
            raise TransportError(str(error)) from error

    def mark(self) -> Mark:
        self._enter()
        return self._lane.mark()

    def _enter(self) -> None:
        if not getattr(self._threads, "entered", False):
            device.use_device(self._index)
            self._threads.entered = True
