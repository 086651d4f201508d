"""Copiers from a peer's memory into this worker's: the copy engines of a GPU, or this thread."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import TAG_BYTES, TURN_BYTES
from tandem.kvtransfer.transports.base import (
    BlockExtents,
    Check,
    Extent,
    PartExtents,
    Region,
    Traits,
)
from tandem.memory import device, shared
from tandem.memory.copies import Lane
from tandem.memory.device import DeviceMemoryError, DeviceRange
from tandem.memory.shared import SharedMemory, check_touched

Numbers = NDArray[np.int64]
Turns = NDArray[np.uint64]


class PeerTags:
    """Tags of a peer, mapped on construction as long as a reference exists."""

    def __init__(self, descriptor: int, size: int) -> None:
        """The descriptor stays the caller's. Raises TransportError, also for missing pages, which
        reading would add to this process."""
        try:
            check_touched(descriptor, size)
            mapping = SharedMemory.given(descriptor, size).map(writable=False)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"a peer's tags cannot be mapped: {error}") from error
        count = len(mapping) // (TAG_BYTES + TURN_BYTES)
        table = np.frombuffer(mapping, np.uint8, count * TAG_BYTES)
        self._tags: NDArray[np.uint8] = table.reshape(count, TAG_BYTES)
        self._turns: Turns = np.frombuffer(mapping, np.uint64, count, count * TAG_BYTES)

    def __len__(self) -> int:
        return len(self._turns)

    def turns_of(self, blocks: Numbers) -> Turns:
        """Return the current turns of the blocks' tags."""
        return self._turns[blocks]

    def tags_of(self, blocks: Numbers, turns: Turns) -> bytes:
        """Return the current tags, concatenated, cleared if their turn has changed. P raises a
        block's turn before it changes its tag."""
        tags, now = self._tags[blocks], self._turns[blocks]
        if now.tobytes() != turns.tobytes():
            tags[now != turns] = 0
        return tags.tobytes()


MOST_BLOCKS = 512
"""Usual upper bound of the blocks of one read."""
LARGE_BYTES = 4 << 20
"""Size from which joining ranges makes copies no faster."""


class Reach(NamedTuple):
    """Bounds of the ranges at both ends."""

    source: int
    source_stop: int
    target: int
    target_stop: int


class Batch(NamedTuple):
    """Extents between one region of P and one of D; offsets and sizes in bytes."""

    remote: Region
    local: Region
    sources: Numbers
    targets: Numbers
    sizes: Numbers
    tagged: bool
    """Whether tags are to be read: of ``blocks``, or, without these, of each extent as a block."""
    blocks: Numbers | None = None
    """P's blocks that these are, or of which they are the parts."""
    reach: Reach | None = None
    """Bounds of whole blocks, if they are known without a check of each."""

    def joined(self) -> Batch:
        """Return a batch with adjacent ranges joined, except large ones."""
        if self.sizes[0] >= LARGE_BYTES:
            return self
        stops, ends = self.sources + self.sizes, self.targets + self.sizes
        apart = (self.sources[1:] != stops[:-1]) | (self.targets[1:] != ends[:-1])
        first = np.concatenate(([0], np.flatnonzero(apart) + 1))
        sizes = np.add.reduceat(self.sizes, first)
        return self._replace(sources=self.sources[first], targets=self.targets[first], sizes=sizes)

    def fits(self, *, source_bytes: int, target_bytes: int) -> bool:
        """Return whether both regions contain all of these bytes."""
        if self.reach is not None:
            reach = self.reach
            read = 0 <= reach.source < reach.source_stop <= source_bytes
            return read and 0 <= reach.target < reach.target_stop <= target_bytes
        return bool(
            self.sources.min() >= 0
            and self.targets.min() >= 0
            and (self.sources + self.sizes).max() <= source_bytes
            and (self.targets + self.sizes).max() <= target_bytes
        )


@lru_cache(maxsize=8)
def _equal(size: int, count: int) -> Numbers:
    return np.full(count, size, dtype=np.int64)


def batches(extents: Sequence[Extent]) -> list[Batch]:
    """Return the extents grouped by region, those whose tags are read in their order."""
    if not extents:
        return []
    if isinstance(extents, BlockExtents):
        size, theirs, mine = extents.block_bytes, extents.remote_blocks, extents.block_ids
        blocks = np.array(
            (theirs, mine), dtype=np.int64
        )  # one array instead of two, as numpy's calls are slow
        sources, targets = blocks * size
        sizes = _equal(size, max(MOST_BLOCKS, len(extents)))[: len(extents)]
        # Bounds of lists are faster than those of arrays.
        reach = Reach(
            min(theirs) * size, (max(theirs) + 1) * size, min(mine) * size, (max(mine) + 1) * size
        )
        there, here = Region.BLOCKS, Region.BLOCKS
        return [Batch(there, here, sources, targets, sizes, True, blocks[0], reach)]
    if isinstance(extents, PartExtents):
        sources, targets = extents.sources, extents.targets
        sizes = np.full(len(extents), extents.nbytes, dtype=np.int64)
        blocks = np.array(extents.remote_blocks, dtype=np.int64)
        return [Batch(Region.BLOCKS, Region.BLOCKS, sources, targets, sizes, True, blocks)]
    grouped: dict[tuple[Region, Region, bool], list[tuple[int, int, int]]] = {}
    for local, remote, nbytes, check in extents:
        kind = (remote.region, local.region, check is Check.TAG)
        grouped.setdefault(kind, []).append((remote.offset, local.offset, nbytes))
    found = []
    for (there, here, tagged), rows in grouped.items():
        sources, targets, sizes = np.array(rows, dtype=np.int64).T
        found.append(Batch(there, here, sources, targets, sizes, tagged=tagged))
    return found


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
    """Maximum extents of one read, which are reported together."""
    pieces: int
    """Maximum pieces of one block that is copied into blocks of another size."""

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
    """Copier between GPUs of one machine. It uses the copy engines, on a stream of its own: they
    slow a step less than a gather kernel does."""

    at_once = pieces = 512

    def __init__(self, where: torch.device) -> None:
        """``where`` is the device of this worker's KV cache. Raises TransportError."""
        self._index = where.index if where.index is not None else torch.cuda.current_device()
        try:
            self._lane = Lane(self._index)
        except RuntimeError as error:  # the first streams of a process take memory of the device
            raise TransportError(f"no stream to copy KV on: {error}") from error
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
