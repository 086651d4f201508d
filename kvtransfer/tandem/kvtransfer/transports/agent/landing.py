"""Landing slots of a consumer: which piece of which read lands where.

The agent writes a slot from its request until its answer; a slot of a read that was given up is
quarantined until then. Slots of a lost agent are never used again: ``agent_lost`` begins new ones
(``generation``).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import NoAgentYet, TransportError
from tandem.kvtransfer.handoff.pull import SlotRing, SlotState
from tandem.kvtransfer.memory.slots import slot_bytes_for, slot_sizes
from tandem.kvtransfer.transports.agent.line import Line, check_hello
from tandem.kvtransfer.transports.agent.wire import (
    MAX_RING_BYTES,
    MAX_SLOTS,
    VERSION,
    Connection,
    Copied,
    Copy,
    Give,
    Hello,
    Refused,
    Registered,
    Rejected,
    Take,
    ToWorker,
    agents_proof,
    consumers_proof,
)
from tandem.kvtransfer.transports.mapped.copiers import Copier, Source
from tandem.kvtransfer.transports.mapped.wire import Given, fresh, is_proof
from tandem.protocol.ids import Incarnation, RequestKey

logger = logging.getLogger(__name__)

AGENT_SECONDS = 5.0
"""Seconds without a message after which an agent that owes an answer is lost."""


class Asker:
    """Connection to the agent; open while ``line`` is set."""

    def __init__(self, folder: Path, copier: Copier, incarnation: Incarnation) -> None:
        self._folder, self._copier, self._incarnation = folder, copier, incarnation
        self._sizes = (1, 1, 1)
        self._line: Line | None = None
        self._greeted: Connection | None = None
        self.memory: Tensor | None = None
        """Landing slots of the current agent, mapped as long as a reference exists."""
        self._unsent: deque[tuple[Copy, bytes]] = deque()
        """Requests, and the key of the producer of each."""
        self._asked: dict[int, tuple[Copy, bytes]] = {}
        """Requests that were sent and have no answer, by number."""
        self._received_at = 0.0
        self.slots: Source | None = None
        """The same as a source."""

    def receive(self, *, slot_bytes: int, num_slots: int, block_bytes: int) -> None:
        self._sizes = (slot_bytes, num_slots, block_bytes)

    @property
    def connected(self) -> bool:
        return self._line is not None

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the landing slots' memory; read by any thread."""
        memory = self.memory
        return 0 if memory is None else memory.numel()

    def filenos(self) -> list[int]:
        """Return the descriptor of the agent's socket, if all requests have been sent."""
        return [] if self._line is None or self._unsent else [self._line.fileno()]

    def connect(self) -> None:
        """Connect to the agent. Raises NoAgentYet if there is none, or an untrusted one, which may
        be replaced."""
        if self._line is None:
            try:
                self._line = Line(self._folder)
            except TransportError as error:
                raise NoAgentYet(str(error)) from error
            self._greeted, self._received_at = None, time.monotonic()

    def ask(self, request: Copy, key: bytes) -> None:
        """Send a request as soon as the agent listens. ``key`` is the producer's, and proves the
        request. Raises TransportError if the agent is gone."""
        self._unsent.append((request, key))
        if self._line is not None:
            self._send_queued(self._line)

    def answers(self, *, awaited: bool) -> Iterator[Copied | Refused]:
        """Yield the agent's answers; ``awaited`` if it owes one. Raises TransportError if it is
        gone."""
        if self._line is None:
            return
        self._send_queued(self._line)
        while (message := self._line.receive()) is not None:
            self._received_at = time.monotonic()
            if self._greeted is None:
                self._register(self._line, check_hello(message))
            elif isinstance(message, Copied | Refused):
                self._check(message, self._greeted)
                yield message
            elif isinstance(message, Rejected):
                raise TransportError(f"the node's agent rejected this worker: {message.reason}")
            elif not isinstance(message, Registered):
                raise TransportError("the node's agent does not follow the protocol")
            self._send_queued(self._line)
        if self._greeted is not None and not awaited:
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at > AGENT_SECONDS:
            raise TransportError(f"the node's agent has been silent for {AGENT_SECONDS:g} s")

    def close(self) -> None:
        """Close the connection, at which the agent releases the slots."""
        if self._line is not None:
            self._line.close()
        self._line = self.memory = self.slots = self._greeted = None
        self._unsent.clear()
        self._asked.clear()

    def _check(self, answer: Copied | Refused, connection: Connection) -> None:
        request, key = self._asked.pop(answer.number, (None, b""))
        if request is None:
            raise TransportError("the node's agent answered an unknown request")
        if isinstance(answer, Copied):
            expected = agents_proof(key, connection, request, answer.tags)
            if not is_proof(answer.proof, expected):
                raise TransportError("the node's agent does not have the producer's key")

    def _register(self, line: Line, hello: Hello) -> None:
        slot_bytes, num_slots, block_bytes = self._sizes
        self.memory, self.slots = self._copier.make(slot_bytes * num_slots)
        descriptor, _ = self._copier.share(self.memory, writable=True)
        where, greeted = self._copier.where(), Connection(hello.challenge, fresh())
        try:
            named = VERSION, self._incarnation
            registration = Take(
                *named, slot_bytes, num_slots, block_bytes, where, greeted.consumers
            )
            if not line.send_message(registration, [descriptor]):
                raise TransportError("the node's agent accepts no registration")
        finally:
            os.close(descriptor)
        self._greeted = greeted

    def _send_queued(self, line: Line) -> None:
        while self._greeted is not None and self._unsent:
            request, key = self._unsent[0]
            proof = consumers_proof(key, self._greeted, request.producer, request.consumer)
            if not line.send_message(msgspec.structs.replace(request, proof=proof)):
                return
            self._asked[request.number] = self._unsent.popleft()


GPU_FACTOR = 2
"""Receive slots per landing slot on a GPU; larger pieces cost less time."""
GPU_LANDING_BYTES = 128 << 20
"""Default of the most bytes of a GPU's landing slot."""


@dataclass(frozen=True, slots=True)
class LandingSizes:
    """Sizes that follow from the settings of receive slots."""

    config: KVTransferConfig
    on_gpu: bool = False

    @property
    def _factor(self) -> int:
        return GPU_FACTOR if self.on_gpu and self.config.kv_slot_bytes is None else 1

    @property
    def per_peer(self) -> int:
        return -(-self.config.kv_slots_per_peer // self._factor)

    def of(self, block_bytes: int, kv_cache: Tensor) -> tuple[int, int]:
        """Return bytes and number of slots, for blocks of ``kv_cache`` (uint8 [blocks,
        block_bytes])."""
        wanted, total = self.config.kv_slots, None
        if kv_cache.is_cuda:
            total = torch.cuda.get_device_properties(kv_cache.device).total_memory
        sizes = slot_sizes(self.config, block_bytes, count=wanted, gpu_bytes=total)
        slot_bytes = sizes.slot_bytes * self._factor
        if self._factor > 1:
            slot_bytes = min(slot_bytes, max(GPU_LANDING_BYTES, slot_bytes_for(0, block_bytes)))
        count = -(-wanted // self._factor)
        return slot_bytes, max(1, min(count, MAX_SLOTS, MAX_RING_BYTES // slot_bytes))


FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
ANSWER_SECONDS = 5.0


class Giver:
    """Thread that keeps P registered, from ``start`` to ``stop``."""

    def __init__(self, folder: Path, registration: Give, given: Given) -> None:
        """Take the descriptors over."""
        self._folder, self._registration, self._given = folder, registration, given
        self.registered = threading.Event()
        """Set while the agent has the memory."""
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the registration: the agent releases the memory."""
        self._stop_writer.send(b"\0")
        self._thread.join(timeout=5.0)
        self._stop_writer.close()

    def _run(self) -> None:
        pause, reported = FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                line = Line(self._folder)
                try:
                    self._register(line)
                    pause, reported = FIRST_PAUSE_SECONDS, ""
                    if self._wait(line, None) is not None:
                        raise TransportError("the node's agent sent an unexpected message")
                finally:
                    self.registered.clear()
                    line.close()
            except TransportError as error:
                if str(error) != reported:  # once, not at each try
                    reported = str(error)
                    logger.warning("KV is not given to the node's agent: %s", error)
            except InterruptedError:
                break
            if self._stops(pause):
                break
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._given.close()
        self._stop_reader.close()

    def _register(self, line: Line) -> None:
        hello = self._wait(line, ANSWER_SECONDS)
        if hello is None:
            raise TransportError("the node's agent does not answer")
        check_hello(hello)
        if not line.send_message(self._registration, self._given.descriptors):
            raise TransportError("the node's agent accepts no registration")
        answer = self._wait(line, ANSWER_SECONDS)
        if isinstance(answer, Rejected):
            raise TransportError(answer.reason)
        if not isinstance(answer, Registered):
            raise TransportError("the node's agent does not answer the registration")
        self.registered.set()
        logger.info("KV of this worker is given to the node's agent")

    def _wait(self, line: Line, seconds: float | None) -> ToWorker | None:
        """Return the next message, or None after the time. Raises TransportError at the line's end,
        InterruptedError when this worker stops."""
        poll = select.poll()
        for each in (line.fileno(), self._stop_reader.fileno()):
            poll.register(each, select.POLLIN)
        ready = dict(poll.poll(None if seconds is None else seconds * 1000))
        if self._stop_reader.fileno() in ready:
            raise InterruptedError
        return line.receive() if ready else None

    def _stops(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._stop_reader, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


LANDING_KEY = RequestKey(b"", "landing", 0)
"""Key of landing slots; no router has an empty incarnation."""


class Piece(NamedTuple):
    """Part of a read, small enough for one landing slot."""

    peer: Incarnation
    ticket: int
    part: int
    """Number of the piece within its read."""


class Landing:
    """Slots, pieces that wait for one, and pieces that have one."""

    ring_type: type[SlotRing] = SlotRing

    def __init__(self, count: int, per_peer: int) -> None:
        self._count, self._per_peer = count, per_peer
        self.generation = 0
        """Generation of the slots' memory."""
        self.ring = self.ring_type(count, per_peer)
        self._waiting: dict[Incarnation, deque[Piece]] = {}
        """Queues by peer; the first peer is next."""
        self._asked: dict[int, Piece] = {}
        """Requested pieces without an answer, by slot."""

    def add(self, pieces: list[Piece]) -> None:
        for each in pieces:
            self._waiting.setdefault(each.peer, deque()).append(each)

    def grant(self) -> tuple[int, Piece] | None:
        """Assign a slot to the next piece, of each peer in turn, and return both for a request.
        None if there is no piece or slot."""
        for peer in self._waiting:
            if self.ring.has_room(peer):
                break
        else:
            return None
        queue = self._waiting.pop(peer)
        piece = queue.popleft()
        if queue:
            self._waiting[peer] = queue
        slot = self.ring.take(peer, LANDING_KEY, piece.part)
        self._asked[slot] = piece
        return slot, piece

    def answered(self, slot: int) -> Piece | None:
        """Return the piece of an answered slot, which keeps it until ``over``. None if it was given
        up; the slot is free then."""
        piece = self._asked.pop(slot, None)
        if piece is None and self.ring[slot].state is SlotState.QUARANTINED:
            self.ring.give(slot)
        return piece

    def over(self, slot: int, generation: int) -> None:
        """Free a slot of this generation after the use of its data."""
        if generation == self.generation:
            self.ring.give(slot)

    def give_up(self, ticket: int) -> None:
        """Give a read up: drop queued pieces and quarantine slots being written; answered ones stay
        until ``over``."""
        for peer, queue in list(self._waiting.items()):
            self._waiting[peer] = deque(each for each in queue if each.ticket != ticket)
            if not self._waiting[peer]:
                del self._waiting[peer]
        for slot, piece in list(self._asked.items()):
            if piece.ticket == ticket:
                del self._asked[slot]
                self.ring.quarantine(slot)

    def agent_lost(self) -> set[int]:
        """Make new slots for the next agent; return the tickets of reads without all answers."""
        lost = {each.ticket for each in self._asked.values()}
        lost |= {each.ticket for queue in self._waiting.values() for each in queue}
        self.generation += 1
        self.ring = self.ring_type(self._count, self._per_peer)
        self._waiting.clear()
        self._asked.clear()
        return lost

    def copy(self) -> Landing:
        other = type(self)(self._count, self._per_peer)
        other.generation, other.ring = self.generation, self.ring.copy()
        other._waiting = {peer: queue.copy() for peer, queue in self._waiting.items()}
        other._asked = dict(self._asked)
        return other

    def snapshot(self) -> tuple[object, ...]:
        """Return a hashable value, equal for slots that behave alike."""
        waiting = tuple((peer, tuple(queue)) for peer, queue in self._waiting.items())
        return (self.ring.snapshot(), waiting, tuple(sorted(self._asked.items())))

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_asking(self) -> bool:
        return bool(self._asked) or self.ring.quarantined > 0
