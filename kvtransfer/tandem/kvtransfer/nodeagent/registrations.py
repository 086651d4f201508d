"""Registrations with the agent, and the permitted copies between them.

A registration ends with its connection; its memory is released after the last copy.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.agent.wire import (
    HOST,
    MAX_RING_BYTES,
    Connection,
    Copied,
    Copy,
    Fault,
    Give,
    Ground,
    Take,
    agents_proof,
    consumers_proof,
)
from tandem.kvtransfer.transports.base import Region
from tandem.kvtransfer.transports.mapped.copiers import (
    Batch,
    Mark,
    Numbers,
    PeerTags,
    Reach,
    Through,
    Turns,
)
from tandem.kvtransfer.transports.mapped.wire import is_proof
from tandem.memory import device
from tandem.memory.copies import Lane
from tandem.memory.device import DeviceMemoryError, DeviceRange
from tandem.memory.shared import SharedMemory


class Source(Protocol):
    """A range of a producer."""

    size: int

    def close(self) -> None:
        """Release it; no copy from it is under way. May be called twice."""
        ...


class Ring(Protocol):
    """Landing slots of a consumer."""

    size: int

    def copy(self, source: Source, batch: Batch) -> Mark:
        """Begin to copy between ranges that both have; return a mark after the copy. Raises
        TransportError, also for different kinds of memory; no bytes are written after it."""
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
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class HostRing:
    """Landing slots in host memory, whose copies are done when ``copy`` returns."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Raise TransportError unless it is memory of this size, can be sealed, and all its pages
        exist."""
        try:
            self._mapping: mmap.mmap = SharedMemory.lent(descriptor, size)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"landing slots cannot be mapped: {error}") from error
        self.size = size
        self._bytes = memoryview(self._mapping)

    def copy(self, source: Source, batch: Batch) -> Mark:
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
                    raise TransportError("a producer's memory is smaller than announced")
                done += got
        return Through()

    def close(self) -> None:
        self._bytes.release()
        self._mapping.close()


class DeviceSource:
    """A range in memory of a GPU, mapped for each GPU at its first copy."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Keep a duplicate descriptor."""
        self.size = size
        self._descriptor = os.dup(descriptor)
        self._mapped: dict[int, DeviceRange] = {}

    def seen_by(self, index: int) -> DeviceRange:
        """Map it for reads of that GPU. Raises DeviceMemoryError if the GPU cannot reach it."""
        if index not in self._mapped:
            self._mapped[index] = device.map_range(self._descriptor, self.size, index)
        return self._mapped[index]

    def close(self) -> None:
        for each in self._mapped.values():
            each.close()
        self._mapped.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class DeviceRing:
    """Landing slots in memory of a GPU, filled by its copy engines on their own stream."""

    def __init__(self, descriptor: int, size: int, index: int) -> None:
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
            with contextlib.suppress(RuntimeError):  # of a failed GPU, which copies no more
                self._lane.wait()  # the slot is the consumer's again after these
            raise TransportError(str(error)) from error

    def close(self) -> None:
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
    try:
        device.check_descriptor(descriptor)
    except DeviceMemoryError as error:
        raise TransportError(str(error)) from error


def _index_of(where: str) -> int:
    try:
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == where:
                return index
    except RuntimeError as error:  # counted without CUDA, which cannot be used
        raise TransportError(f"the agent cannot use its GPUs: {error}") from error
    raise TransportError(f"the agent does not see the GPU {where!r}")


logger = logging.getLogger(__name__)

_REGIONS = {Ground.BLOCKS: Region.BLOCKS, Ground.SLOTS: Region.SLOTS}


class Producer:
    """Memory to be read: KV cache, slots and tags."""

    def __init__(self, registration: Give, descriptors: Sequence[int]) -> None:
        """The descriptors stay the caller's. Raises TransportError, or OSError without a descriptor
        left."""
        self.incarnation, self.key = registration.incarnation, registration.key
        self.block_bytes = registration.block_bytes
        self.sources: dict[Ground, Source] = {}
        self.under_way = 0
        self._closed = False
        kv_cache, slots, tags = descriptors
        try:
            for ground, each in zip(Ground, (kv_cache, slots), strict=True):
                self.sources[ground] = open_source(
                    registration.where, each, registration.sizes[ground]
                )
            self.tags: PeerTags | None = PeerTags(tags, registration.sizes[2])
        except (TransportError, OSError):
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        if not self.under_way:
            for each in self.sources.values():
                each.close()
            self.tags = None

    def copy_ended(self) -> None:
        self.under_way -= 1
        if self._closed:
            self.close()


class Consumer:
    """Landing slots to be written."""

    def __init__(self, registration: Take, descriptor: int, challenge: bytes) -> None:
        """The descriptor stays the caller's; ``challenge`` is the agent's. Raises
        TransportError."""
        self.incarnation = registration.incarnation
        self.connection = Connection(challenge, registration.challenge)
        self.slot_bytes, self.num_slots = registration.slot_bytes, registration.num_slots
        self.block_bytes = registration.block_bytes
        self.ring: Ring = open_ring(
            registration.where, descriptor, registration.slot_bytes * registration.num_slots
        )
        self.busy: set[int] = set()
        """Slots of requests that are not answered."""
        self.under_way = 0
        self._closed = False

    def close(self) -> None:
        self._closed = True
        if not self.under_way:
            self.ring.close()

    def copy_ended(self) -> None:
        self.under_way -= 1
        if self._closed:
            self.close()


@dataclass(slots=True)
class Running:
    """A copy that has begun."""

    request: Copy
    producer: Producer
    consumer: Consumer
    mark: Mark
    blocks: Numbers
    """Numbers of the copied blocks, if blocks are copied."""
    turns: Turns | None
    """Turns of their tags before the copy began."""
    failed: bool = False
    """Known once it has ended."""

    def ended(self) -> bool:
        """Return whether the copy has ended, also because its GPU has failed."""
        try:
            return self.failed or self.mark.done()
        except DeviceMemoryError as error:
            logger.error("a copy for %s failed: %s", self.consumer.incarnation.hex()[:8], error)
            self.failed = True
            return True

    def tags(self) -> bytes:
        """Return the current tags of its blocks, cleared if their turn has changed."""
        if self.turns is None or self.producer.tags is None:
            return b""
        return self.producer.tags.tags_of(self.blocks, self.turns)

    def answer(self) -> Copied:
        """Return the consumer's answer, with a proof that the producer is registered here."""
        tags, connection = self.tags(), self.consumer.connection
        proof = agents_proof(self.producer.key, connection, self.request, tags)
        return Copied(self.request.number, tags, proof)

    def end(self) -> None:
        """Allow the release of memory that waits for this copy."""
        self.producer.copy_ended()
        self.consumer.copy_ended()


@dataclass(slots=True)
class Producers:
    """Registered producers by incarnation."""

    known: dict[bytes, Producer] = field(default_factory=dict)

    def why_not(self, registration: Give) -> str | None:
        """Return why a registration is refused: its incarnation has another key. Else None."""
        there = self.known.get(registration.incarnation)
        if there is not None and not is_proof(there.key, registration.key):
            return "a producer of this incarnation is registered with another key"
        return None

    def enter(self, producer: Producer) -> None:
        """Register a producer; replace an earlier registration whose connection is still up."""
        self.known[producer.incarnation] = producer

    def leave(self, producer: Producer) -> None:
        if self.known.get(producer.incarnation) is producer:
            del self.known[producer.incarnation]
        producer.close()

    def begin(self, request: Copy, consumer: Consumer) -> Running | Fault:
        """Begin a copy into a slot of ``consumer``, or return why not."""
        producer = self.known.get(request.producer)
        if producer is None:
            return Fault.UNKNOWN
        connection, names = consumer.connection, (request.producer, consumer.incarnation)
        if not is_proof(request.proof, consumers_proof(producer.key, connection, *names)):
            return Fault.DENIED
        batch = _batch_of(request, consumer.slot_bytes)
        if not _is_within(request, batch, producer, consumer):
            return Fault.OUTSIDE
        blocks = batch.sources // request.size
        assert producer.tags is not None, "it is registered"
        turns = producer.tags.turns_of(blocks) if batch.tagged else None
        try:
            mark = consumer.ring.copy(producer.sources[request.ground], batch)
        except TransportError as error:
            logger.warning("a copy for %s failed: %s", consumer.incarnation.hex()[:8], error)
            return Fault.FAILED
        producer.under_way += 1
        consumer.under_way += 1
        return Running(request, producer, consumer, mark, blocks, turns)


def _batch_of(request: Copy, slot_bytes: int) -> Batch:
    count, region = len(request.places), _REGIONS[request.ground]
    targets = request.slot * slot_bytes + np.arange(count, dtype=np.int64) * request.size
    sizes = np.full(count, request.size, dtype=np.int64)
    sources = np.array(request.places, dtype=np.int64)
    tagged, first = request.ground is Ground.BLOCKS, request.slot * slot_bytes
    least, most = min(request.places), max(request.places)
    reach = Reach(least, most + request.size, first, first + count * request.size)
    return Batch(region, Region.SLOTS, sources, targets, sizes, tagged, reach=reach)


def _is_within(request: Copy, batch: Batch, producer: Producer, consumer: Consumer) -> bool:
    if len(request.places) * request.size > consumer.slot_bytes:
        return False
    if request.slot >= consumer.num_slots:
        return False
    source = producer.sources[request.ground]
    if not batch.fits(source_bytes=source.size, target_bytes=consumer.ring.size):
        return False
    if not batch.tagged:
        return True
    if not request.size == producer.block_bytes == consumer.block_bytes:
        return False
    if (batch.sources % request.size).any():
        return False
    return max(request.places) // request.size < len(producer.tags or ())
