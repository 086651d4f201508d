"""Reads by the node's agent: it copies into landing slots, and D from there into its blocks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import TAG_BYTES, Blocks, SharedTags
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.transports.agent.landing import Asker, Giver, Landing, LandingSizes, Piece
from tandem.kvtransfer.transports.agent.line import agent_folder
from tandem.kvtransfer.transports.agent.wire import (
    MAX_PLACES,
    VERSION,
    AgentCard,
    Copied,
    Copy,
    Fault,
    Give,
    Ground,
    Refused,
    decode_card,
    encode,
)
from tandem.kvtransfer.transports.base import (
    Extent,
    Progress,
    Region,
    Ticket,
)
from tandem.kvtransfer.transports.mapped.copiers import Batch, Copier, Mark, batches, traits_of
from tandem.kvtransfer.transports.mapped.transport import make_copier
from tandem.kvtransfer.transports.mapped.wire import (
    COPYING,
    PROOF_BYTES,
    SECRET_BYTES,
    Given,
    key_for,
    open_folder,
    place_of,
)
from tandem.kvtransfer.waiting import is_foretold
from tandem.protocol.ids import Incarnation


def pieces_of(extents: Sequence[Extent], slot_bytes: int) -> list[Batch]:
    """Return batches of ranges of one size each, in the order of the extents. None is larger than a
    slot; blocks are never cut."""
    found: list[Batch] = []
    for batch in batches(extents):
        for part in (batch,) if batch.tagged else _lone(batch, slot_bytes):
            most = max(1, min(MAX_PLACES, slot_bytes // int(part.sizes[0])))
            if len(part.sizes) <= most:
                found.append(part)
                continue
            starts = range(0, len(part.sizes), most)
            found += [_sliced(part, slice(first, first + most)) for first in starts]
    return found


def landed(piece: Batch, slot: int, slot_bytes: int) -> Batch:
    """Return the piece as it is in a landing slot: its ranges joined."""
    sources = slot * slot_bytes + np.concatenate(([0], np.cumsum(piece.sizes)[:-1]))
    return piece._replace(sources=sources, reach=None)


def _lone(batch: Batch, slot_bytes: int) -> Iterator[Batch]:
    for row in range(len(batch.sizes)):
        size = int(batch.sizes[row])
        for begin in range(0, size, slot_bytes):
            one = _sliced(batch, slice(row, row + 1))
            yield one._replace(
                sources=one.sources + begin,
                targets=one.targets + begin,
                sizes=np.array([min(slot_bytes, size - begin)], dtype=np.int64),
            )


def _sliced(batch: Batch, at: slice) -> Batch:
    return batch._replace(
        sources=batch.sources[at],
        targets=batch.targets[at],
        sizes=batch.sizes[at],
        blocks=None if batch.blocks is None else batch.blocks[at],
        reach=None,
    )


logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
UNKNOWN_SECONDS = 3.0
"""Seconds in which a producer that is unknown to the agent may register."""
RETRY_SECONDS = 0.05
_GROUNDS = {Region.BLOCKS: Ground.BLOCKS, Region.SLOTS: Ground.SLOTS}


@dataclass(slots=True)
class _Read:
    """A read that has not ended."""

    peer: Incarnation
    pieces: list[Batch]
    started: float
    left: int
    """Pieces that have not come."""
    taking: int = 0
    failed: bool = False
    tags: dict[int, bytes] = field(default_factory=dict)


class _Taking(NamedTuple):
    """A piece that is being copied from its slot into blocks."""

    mark: Mark
    slot: int
    generation: int
    memory: Tensor
    """Memory of the slots, mapped as long as the copy runs."""
    read: _Read


class AgentTransport:
    """Transport of both ends."""

    def __init__(
        self,
        name: str,
        incarnation: Incarnation,
        copier: Copier,
        folder: Path,
        sizes: LandingSizes,
        *,
        on_gpu: bool,
    ) -> None:
        self.traits = traits_of(name, copier, on_gpu=on_gpu, by_agent=True)
        self._incarnation, self._copier, self._folder = incarnation, copier, folder
        self._sizes = sizes
        self._giver: Giver | None = None
        self._asker = Asker(folder, copier, incarnation)
        self._here: dict[Region, Tensor] = {}
        self._slot_bytes = 0
        self._landing = Landing(1, 1)
        self._tickets = count()
        self._secrets: dict[Incarnation, bytes] = {}
        self._reads: dict[Ticket, _Read] = {}
        self._taking: list[_Taking] = []
        self._later: list[tuple[float, Piece]] = []
        """Pieces to request again, and when."""
        self._tags: dict[Ticket, bytes] = {}

    def serve(self, memory: SlotMemory, blocks: Blocks | None = None) -> bytes:
        """Register KV cache, slots and tags with the agent, whenever there is one. Raises
        TransportError."""
        assert blocks is not None, "a transport of blocks is given some"
        assert isinstance(blocks.tags, SharedTags), "the agent reads the tags"
        found = [self._copier.share(blocks.kv_cache), self._copier.share(memory.rows)]
        found.append(blocks.tags.share())
        (a, na), (b, nb), (c, nc) = found
        sizes, secret = (na, nb, nc), os.urandom(SECRET_BYTES)
        card = AgentCard(VERSION, place_of(self._folder), self._incarnation, secret)
        block_bytes, where = blocks.kv_cache.shape[1], self._copier.where()
        key = key_for(secret, COPYING)
        registration = Give(VERSION, self._incarnation, key, sizes, block_bytes, where)
        self._giver = Giver(self._folder, registration, Given((a, b, c), sizes))
        self._giver.start()
        return encode(card)

    def receive(self, memory: SlotMemory, blocks: Blocks | None = None) -> None:
        assert blocks is not None, "a transport of blocks is given some"
        self._here = {Region.BLOCKS: blocks.kv_cache.view(-1), Region.SLOTS: memory.rows.view(-1)}
        block_bytes = blocks.kv_cache.shape[1]
        self._slot_bytes, slots = self._sizes.of(block_bytes, blocks.kv_cache)
        self._landing = Landing(slots, self._sizes.per_peer)
        self._asker.receive(slot_bytes=self._slot_bytes, num_slots=slots, block_bytes=block_bytes)

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """Keep the producer's card. Raises TransportError if the producer is not on this machine,
        NoAgentYet if there is no agent."""
        self._forget(peer)
        decoded = decode_card(card)
        if decoded.incarnation != peer:
            raise TransportError("the card is of another producer")
        if decoded.place != place_of(self._folder):
            raise TransportError(f"the producer uses another agent than that of {self._folder}")
        self.advance()  # an agent that has ended does not count
        self._asker.connect()
        self._secrets[peer] = decoded.secret

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        pieces = pieces_of(extents, self._slot_bytes)
        read = self._reads[ticket] = _Read(peer, pieces, time.monotonic(), len(pieces))
        fits = all(_has(self._here[each.local], each) for each in pieces)
        if peer not in self._secrets or not fits:
            read.failed = True
            return ticket
        self.advance()  # an agent that has ended must not fail this read
        self._landing.add([Piece(peer, ticket, part) for part in range(len(pieces))])
        if self._asker.connected and not self._later:
            self._try(self._ask)  # the connection was checked just now
        else:
            self.advance()
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        read = self._reads[ticket]
        if read.taking or (read.left and not read.failed):
            return Progress.PENDING
        del self._reads[ticket]
        self.look()
        if read.failed:
            return Progress.FAILED
        tags = b"".join(read.tags[index] for index in range(len(read.pieces)))
        if tags:  # a pattern has none
            self._tags[ticket] = tags
        return Progress.DONE

    def tags_of(self, ticket: Ticket) -> bytes:
        """Return the tags that the agent read after its copy; cleared if one changed meanwhile."""
        return self._tags.pop(ticket, b"")

    def advance(self) -> None:
        self._see_taken()
        self._try(self._get_on)

    def _get_on(self) -> None:
        if self._landing.has_waiting or self._later:
            self._asker.connect()
        self._receive_answers()
        self._ask()

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except TransportError as error:
            logger.warning("%s: %s", self.traits.name, error)
            self._lose()

    def filenos(self) -> list[int]:
        """Return the agent's socket for its answers; none while the end of an own copy is
        unknown."""
        return self._asker.filenos() if all(map(is_foretold, self.moments())) else []

    @property
    def held_bytes(self) -> int:
        return self._asker.held_bytes

    def rest(self) -> bool:
        """Close the connection to the agent, which releases the slots as well."""
        if self._reads or self._taking:
            return False
        if self._asker.connected:
            self._lose()
        return True

    def look(self) -> None:
        """Release the slots, unless the agent owes an answer."""
        if self._secrets or not self._asker.connected:
            return
        if self._landing.is_asking:
            self.advance()
        if not self._landing.is_asking:
            self.rest()

    def moments(self) -> list[float]:
        return [each.mark.due for each in self._taking]

    def stirs(self) -> bool:
        return any(each.mark.done() for each in self._taking)

    def close(self, peer: Incarnation) -> None:
        """Fail the peer's reads; slots that the agent may still write are quarantined."""
        self._forget(peer)
        self.look()

    def _forget(self, peer: Incarnation) -> None:
        self._secrets.pop(peer, None)
        for ticket, read in self._reads.items():
            if read.peer == peer:
                self._fail(ticket, read)

    def stop(self) -> None:
        """Close the connection and wait for this worker's own copies."""
        for ticket, read in self._reads.items():
            self._fail(ticket, read)
        self._asker.close()
        end = time.monotonic() + STOP_SECONDS
        while self._taking and time.monotonic() < end:
            self._see_taken()
            time.sleep(0.001)
        if self._giver is not None:
            self._giver.stop()
            self._giver = None

    # Answers of the agent.

    def _receive_answers(self) -> None:
        for answer in self._asker.answers(awaited=self._landing.is_asking):
            slot = answer.number  # a slot has one copy at a time, so its number is unique
            if slot >= len(self._landing.ring):
                raise TransportError("the node's agent answered an unknown request")
            piece = self._landing.answered(slot)
            if piece is None:
                continue
            read = self._reads[Ticket(piece.ticket)]
            if isinstance(answer, Refused):
                self._landing.over(slot, self._landing.generation)
                self._refused(piece, read, answer.fault)
            else:
                self._take(piece, read, slot, answer)

    def _take(self, piece: Piece, read: _Read, slot: int, answer: Copied) -> None:
        batch = read.pieces[piece.part]
        memory, slots = self._asker.memory, self._asker.slots
        assert memory is not None, "an answer requires slots"
        assert slots is not None, "an answer requires slots"
        if len(answer.tags) != TAG_BYTES * len(batch.sizes) * batch.tagged:
            self._landing.over(slot, self._landing.generation)
            self._fail(Ticket(piece.ticket), read)
            raise TransportError("the node's agent sent other tags than requested")
        read.tags[piece.part] = answer.tags
        try:
            source = landed(batch, slot, self._slot_bytes)
            self._copier.copy(self._here[batch.local], slots, source.joined())
        except TransportError as error:
            logger.error("%s: a copy could not be begun: %s", self.traits.name, error)
            self._fail(Ticket(piece.ticket), read)
        read.left -= 1
        read.taking += 1
        generation = self._landing.generation
        self._taking.append(_Taking(self._copier.mark(), slot, generation, memory, read))
        self._see_taken()

    def _refused(self, piece: Piece, read: _Read, fault: Fault) -> None:
        now = time.monotonic()
        if fault is Fault.UNKNOWN and now - read.started < UNKNOWN_SECONDS:
            self._later.append((now + RETRY_SECONDS, piece))
            return
        logger.warning("%s: the node's agent refuses a copy: %s", self.traits.name, fault.name)
        self._fail(Ticket(piece.ticket), read)

    def _see_taken(self) -> None:
        still = []
        for each in self._taking:
            if each.mark.done():
                each.read.taking -= 1
                self._landing.over(each.slot, each.generation)
            else:
                still.append(each)
        self._taking = still

    def _ask(self) -> None:
        now = time.monotonic()
        due = [piece for at, piece in self._later if at <= now]
        self._later = [each for each in self._later if each[0] > now]
        self._landing.add(due)
        while (granted := self._landing.grant()) is not None:
            slot, piece = granted
            batch = self._reads[Ticket(piece.ticket)].pieces[piece.part]
            self._asker.ask(
                Copy(
                    number=slot,
                    producer=piece.peer,
                    proof=bytes(PROOF_BYTES),  # set by the asker
                    consumer=self._incarnation,
                    ground=_GROUNDS[batch.remote],
                    places=tuple(batch.sources.tolist()),
                    size=int(batch.sizes[0]),
                    slot=slot,
                ),
                key_for(self._secrets[piece.peer], COPYING),
            )

    def _fail(self, ticket: Ticket, read: _Read) -> None:
        read.failed = True
        self._landing.give_up(ticket)
        self._later = [each for each in self._later if each[1].ticket != ticket]

    def _lose(self) -> None:
        self._asker.close()
        lost = self._landing.agent_lost() | {piece.ticket for _, piece in self._later}
        self._later.clear()
        for ticket in lost:
            self._reads[Ticket(ticket)].failed = True


def _has(memory: Tensor, piece: Batch) -> bool:
    return piece.fits(source_bytes=1 << 60, target_bytes=memory.numel())


def make_agent(
    name: str, incarnation: Incarnation, config: KVTransferConfig, *, on_gpu: bool
) -> AgentTransport:
    """Return the transport ``name``. Raises TransportError if it cannot reach the KV cache."""
    if on_gpu != (name == "cuda_p2p_agent"):
        where, allowed = ("a GPU", "cuda_p2p_agent") if on_gpu else ("the host", "shm_agent")
        raise TransportError(f"kv_connector: {name}, with KV in memory of {where}: try {allowed}")
    place = agent_folder(open_folder(config.kv_node_folder))
    sizes = LandingSizes(config, on_gpu=on_gpu)
    return AgentTransport(name, incarnation, make_copier(on_gpu), place, sizes, on_gpu=on_gpu)
