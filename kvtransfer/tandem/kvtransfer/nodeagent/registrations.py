"""Registrations with the agent, and the permitted copies between them.

A registration ends with its connection; its memory is released after the last copy that uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.kernels.memory.device import DeviceMemoryError
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.nodeagent.memory import Ring, Source, open_ring, open_source
from tandem.kvtransfer.transports.agent.wire import (
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
from tandem.kvtransfer.transports.mapped.batches import Batch, Reach
from tandem.kvtransfer.transports.mapped.copiers import Mark
from tandem.kvtransfer.transports.mapped.proofs import is_proof
from tandem.kvtransfer.transports.mapped.tags import Numbers, PeerTags, Turns

logger = logging.getLogger(__name__)

_REGIONS = {Ground.BLOCKS: Region.BLOCKS, Ground.SLOTS: Region.SLOTS}


class Producer:
    """Memory to be read: slab, slots and tags."""

    def __init__(self, said: Give, descriptors: Sequence[int]) -> None:
        """The descriptors stay the caller's. Raises TransportError, or OSError without a
        descriptor left."""
        self.incarnation, self.key = said.incarnation, said.key
        self.block_bytes = said.block_bytes
        self.sources: dict[Ground, Source] = {}
        self.under_way = 0
        self._closed = False
        slab, slots, tags = descriptors
        try:
            for ground, each in zip(Ground, (slab, slots), strict=True):
                self.sources[ground] = open_source(said.where, each, said.sizes[ground])
            self.tags: PeerTags | None = PeerTags(tags, said.sizes[2])
        except (TransportError, OSError):
            self.close()
            raise

    def close(self) -> None:
        """Release the memory after the last copy from it."""
        self._closed = True
        if not self.under_way:
            for each in self.sources.values():
                each.close()
            self.tags = None

    def copy_ended(self) -> None:
        """Record the end of a copy that used the memory."""
        self.under_way -= 1
        if self._closed:
            self.close()


class Consumer:
    """Landing slots to be written."""

    def __init__(self, said: Take, descriptor: int, challenge: bytes) -> None:
        """The descriptor stays the caller's; ``challenge`` is the agent's. Raises
        TransportError."""
        self.incarnation = said.incarnation
        self.connection = Connection(challenge, said.challenge)
        self.slot_bytes, self.num_slots = said.slot_bytes, said.num_slots
        self.block_bytes = said.block_bytes
        self.ring: Ring = open_ring(said.where, descriptor, said.slot_bytes * said.num_slots)
        self.busy: set[int] = set()
        """Slots of requests that are not answered."""
        self.under_way = 0
        self._closed = False

    def close(self) -> None:
        """Release the slots after the last copy into them."""
        self._closed = True
        if not self.under_way:
            self.ring.close()

    def copy_ended(self) -> None:
        """Record the end of a copy that used the memory."""
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
        """Return what the consumer is sent, with a proof that the producer is registered here."""
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

    def why_not(self, said: Give) -> str | None:
        """Return why a registration is refused: another producer has the name."""
        there = self.known.get(said.incarnation)
        if there is not None and not is_proof(there.key, said.key):
            return "a producer of this incarnation is registered with another key"
        return None

    def enter(self, producer: Producer) -> None:
        """Register a producer; replace an earlier registration whose connection is still up."""
        self.known[producer.incarnation] = producer

    def leave(self, producer: Producer) -> None:
        """Forget a producer whose connection has ended."""
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
    """Return whether all bytes are the producer's, fit the one slot and, if blocks, have tags."""
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
