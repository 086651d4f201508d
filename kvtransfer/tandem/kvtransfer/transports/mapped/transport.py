"""Reads by mapping: extents are copied from a peer's KV cache and slots, and its tags are read."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import Blocks, SharedTags
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.transports.base import (
    Extent,
    Progress,
    Region,
    Ticket,
)
from tandem.kvtransfer.transports.mapped.copiers import (
    Batch,
    Copier,
    CudaCopier,
    HostCopier,
    Mark,
    Numbers,
    PeerTags,
    Source,
    Turns,
    batches,
    traits_of,
)
from tandem.kvtransfer.transports.mapped.giving import DescriptorServer
from tandem.kvtransfer.transports.mapped.taking import Call
from tandem.kvtransfer.transports.mapped.wire import (
    VERSION,
    Given,
    MappedCard,
    decode_card,
    encode_card,
    open_folder,
    place_of,
)
from tandem.protocol.ids import Incarnation


class PeerMemory:
    """Memory of a peer, mapped on construction, unmapped by ``close``."""

    def __init__(self, given: Given, copier: Copier, block_bytes: int) -> None:
        """The descriptors stay the caller's. Raises TransportError."""
        self.sources: dict[Region, Source] = {}
        self._block_bytes = block_bytes
        self._tags: PeerTags | None = None
        kv_cache, slots, tags = given.descriptors
        try:
            self.sources[Region.BLOCKS] = copier.map(kv_cache, given.sizes[0])
            self.sources[Region.SLOTS] = copier.map(slots, given.sizes[1])
            self._tags = PeerTags(tags, given.sizes[2])
        except TransportError:
            self.close()
            raise

    def has(self, batch: Batch, target_bytes: int) -> bool:
        """Return whether both ends have these bytes, and tags if required; no others may be
        accessed."""
        if not batch.fits(source_bytes=self.sources[batch.remote].size, target_bytes=target_bytes):
            return False
        if not batch.tagged:
            return True
        known = 0 if self._tags is None else len(self._tags)
        if batch.reach is not None:
            return batch.reach.source_stop <= known * self._block_bytes
        whole = batch.blocks is not None or not (batch.sources % self._block_bytes).any()
        blocks = self._blocks(batch)
        return bool(whole and blocks.min() >= 0 and blocks.max() < known)

    def turns_of(self, batch: Batch) -> Turns:
        assert self._tags is not None, "the peer's memory is mapped"
        return self._tags.turns_of(self._blocks(batch))

    def tags_of(self, batch: Batch, turns: Turns) -> bytes:
        assert self._tags is not None, "the peer's memory is mapped"
        return self._tags.tags_of(self._blocks(batch), turns)

    def _blocks(self, batch: Batch) -> Numbers:
        return batch.sources // self._block_bytes if batch.blocks is None else batch.blocks

    def close(self) -> None:
        """Unmap; no copy from it is under way."""
        for each in self.sources.values():
            each.close()
        self.sources.clear()
        self._tags = None


logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0


class _Peer:
    """One producer's memory, or the call for it."""

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call
        self.memory: PeerMemory | None = None
        self.waiting: list[Ticket] = []
        """Reads that came before the memory was mapped."""
        self.in_flight: set[Ticket] = set()
        self.closed = False

    def unmap(self) -> None:
        """Unmap the peer's memory, once no copy is under way."""
        if self.closed and not self.in_flight and self.memory is not None:
            self.memory.close()
            self.memory = None


class _Read(NamedTuple):
    """A read that has not ended."""

    peer: _Peer
    batches: list[Batch]
    mark: Mark | None = None
    """Mark after its copies; None before they began."""
    failed: bool = False
    turns: tuple[Turns, ...] = ()
    """Turns of the tags of each batch whose tags are read, before the first copy."""


class MappedTransport:
    """Transport of both ends."""

    def __init__(
        self,
        name: str,
        incarnation: Incarnation,
        copier: Copier,
        folder: Path,
        *,
        on_gpu: bool,
        on_garbage: Callable[[], None] = lambda: None,
    ) -> None:
        self.traits = traits_of(name, copier, on_gpu=on_gpu, by_agent=False)
        self._incarnation = incarnation
        self._copier = copier
        self._folder = folder
        self._on_garbage = on_garbage
        self._server: DescriptorServer | None = None
        self._here: dict[Region, Tensor] = {}
        self._block_bytes = 0
        self._tickets = itertools.count()
        self._peers: dict[Incarnation, _Peer] = {}
        self._reads: dict[Ticket, _Read] = {}
        self._failed: set[Ticket] = set()
        self._tags: dict[Ticket, bytes] = {}

    def serve(self, memory: SlotMemory, blocks: Blocks | None = None) -> bytes:
        """Share KV cache, slots and tags with peers, once there is a socket (see ``unmet``). Raises
        TransportError."""
        assert blocks is not None, "a transport of blocks is given some"
        assert isinstance(blocks.tags, SharedTags), "peers read the tags"
        found = [self._copier.share(blocks.kv_cache), self._copier.share(memory.rows)]
        found.append(blocks.tags.share())
        (a, na), (b, nb), (c, nc) = found
        given = Given((a, b, c), (na, nb, nc))
        self._server = DescriptorServer(
            given, self._incarnation, self._folder, on_garbage=self._on_garbage
        )
        self._server.start()
        try:
            place = place_of(self._folder)
        except TransportError:
            place = b""
        server = self._server
        card = MappedCard(VERSION, server.path.name, server.secret, self._incarnation, place)
        return encode_card(card)

    @property
    def unmet(self) -> str | None:
        return None if self._server is None else self._server.unmet

    def receive(self, memory: SlotMemory, blocks: Blocks | None = None) -> None:
        assert blocks is not None, "a transport of blocks is given some"
        self._here = {
            Region.BLOCKS: blocks.kv_cache.view(-1),
            Region.SLOTS: memory.rows.view(-1),
        }
        self._block_bytes = blocks.kv_cache.shape[1]

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """Call the producer's socket. Raises TransportError if it is not on this machine or of
        another release, NoSocketYet if it cannot be called yet."""
        self.close(peer)
        self._peers[peer] = _Peer(Call(self._folder, decode_card(card), self._incarnation))

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        known = self._peers.get(peer)
        if known is None or known.closed:
            self._failed.add(ticket)
            return ticket
        self._reads[ticket] = _Read(known, batches(extents))
        known.waiting.append(ticket)
        self._advance(known)
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        if ticket in self._failed:
            self._failed.discard(ticket)
            return Progress.FAILED
        read = self._reads[ticket]
        if read.mark is None or not read.mark.done():
            return Progress.PENDING
        del self._reads[ticket]
        read.peer.in_flight.discard(ticket)
        if read.turns and not read.failed:
            assert read.peer.memory is not None, "it is mapped as long as copies are under way"
            tagged = (each for each in read.batches if each.tagged)
            both = zip(tagged, read.turns, strict=True)
            self._tags[ticket] = b"".join(read.peer.memory.tags_of(*each) for each in both)
        read.peer.unmap()
        return Progress.FAILED if read.failed else Progress.DONE

    def tags_of(self, ticket: Ticket) -> bytes:
        return self._tags.pop(ticket, b"")

    def advance(self) -> None:
        for peer in self._peers.values():
            if peer.waiting:
                self._advance(peer)

    def filenos(self) -> list[int]:
        return []

    def moments(self) -> list[float]:
        return [each.mark.due for each in self._reads.values() if each.mark is not None]

    def stirs(self) -> bool:
        return any(each.mark is not None and each.mark.done() for each in self._reads.values())

    def close(self, peer: Incarnation) -> None:
        """Unmap the peer's memory after the last copy."""
        known = self._peers.pop(peer, None)
        if known is not None:
            self._end(known)

    def stop(self) -> None:
        """Wait for the copies, unmap, end the server."""
        for peer in list(self._peers):
            self.close(peer)
        end = time.monotonic() + STOP_SECONDS
        while self._reads and time.monotonic() < end:
            for ticket in list(self._reads):
                self.poll(ticket)
            time.sleep(0.001)
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _end(self, peer: _Peer) -> None:
        if peer.call is not None:
            peer.call.close()
            peer.call = None
        for ticket in peer.waiting:
            del self._reads[ticket]
            self._failed.add(ticket)
        peer.waiting.clear()
        peer.closed = True
        peer.unmap()

    def _advance(self, peer: _Peer) -> None:
        try:
            if peer.call is not None:
                self._take(peer, peer.call)
            if peer.memory is not None:
                self._start(peer, peer.memory)
        except TransportError as error:
            logger.warning("%s: %s", self.traits.name, error)
            self._end(peer)

    def _take(self, peer: _Peer, call: Call) -> None:
        given = call.poll()
        if given is None:
            return
        try:
            peer.memory = PeerMemory(given, self._copier, self._block_bytes)
        finally:
            given.close()
        call.close()
        peer.call = None

    def _start(self, peer: _Peer, memory: PeerMemory) -> None:
        while peer.waiting:
            ticket = peer.waiting.pop(0)
            read = self._reads[ticket]
            if not all(memory.has(each, self._here[each.local].numel()) for each in read.batches):
                del self._reads[ticket]
                self._failed.add(ticket)
                continue
            peer.in_flight.add(ticket)
            failed = False
            turns = tuple(memory.turns_of(each) for each in read.batches if each.tagged)
            try:
                for each in read.batches:
                    source = memory.sources[each.remote]
                    self._copier.copy(self._here[each.local], source, each.joined())
            except TransportError as error:
                logger.error("%s: a copy could not be begun: %s", self.traits.name, error)
                failed = True  # earlier copies are under way: the read ends after them
            mark = self._copier.mark()
            self._reads[ticket] = read._replace(mark=mark, failed=failed, turns=turns)


def make_mapped(
    name: str,
    incarnation: Incarnation,
    folder: str | None,
    *,
    on_gpu: bool,
    on_garbage: Callable[[], None],
) -> MappedTransport:
    """Return the transport ``name``. Raises TransportError if it cannot reach the KV cache."""
    if on_gpu != (name == "cuda_p2p"):
        where, allowed = ("a GPU", "cuda_p2p") if on_gpu else ("the host", "shm")
        raise TransportError(f"kv_connector: {name}, with KV in memory of {where}: try {allowed}")
    place, copier = open_folder(folder), make_copier(on_gpu)
    return MappedTransport(name, incarnation, copier, place, on_gpu=on_gpu, on_garbage=on_garbage)


def make_copier(on_gpu: bool) -> Copier:
    """Return the copier into this worker's memory."""
    if on_gpu:
        return CudaCopier(torch.device("cuda", torch.cuda.current_device()))
    return HostCopier()
