"""Landing slots of a consumer: which piece of which read lands where.

The agent writes a slot from its request until its answer; a slot of a read that was given up is
quarantined until then. Slots of a lost agent are never used again: ``agent_lost`` begins new ones
(``generation``).
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.slots import SlotRing, SlotState
from tandem.kvtransfer.transports.agent.line import Line, check_hello
from tandem.kvtransfer.transports.agent.wire import (
    Give,
    Registered,
    Rejected,
    ToWorker,
)
from tandem.kvtransfer.transports.mapped.wire import Given
from tandem.protocol.ids import Incarnation, RequestKey

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
ANSWER_SECONDS = 5.0


class Giver:
    """Thread that keeps P registered, from ``start`` to ``stop``."""

    def __init__(self, folder: Path, said: Give, given: Given) -> None:
        """Take the descriptors over."""
        self._folder, self._said, self._given = folder, said, given
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
        pause, told = FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                line = Line(self._folder)
                try:
                    self._register(line)
                    pause, told = FIRST_PAUSE_SECONDS, ""
                    if self._wait(line, None) is not None:
                        raise TransportError("the node's agent sent an unexpected message")
                finally:
                    self.registered.clear()
                    line.close()
            except TransportError as error:
                if str(error) != told:  # once, not at each try
                    told = str(error)
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
        if not line.say(self._said, self._given.descriptors):
            raise TransportError("the node's agent takes no registration")
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
        return line.hear() if ready else None

    def _stops(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._stop_reader, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


LANDING_KEY = RequestKey(b"", "landing", 0)
"""Key of landing slots; no router has an empty incarnation."""


class Piece(NamedTuple):
    """Part of a read that fits one slot."""

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
