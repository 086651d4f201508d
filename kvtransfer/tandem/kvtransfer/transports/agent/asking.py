"""D's half: registers landing slots with the agent, sends requests, receives answers.

The slots' memory is allocated again for each agent: a copy of a lost one may still write its own
ring.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
from torch import Tensor

from tandem.kvtransfer.errors import NoAgentYet, TransportError
from tandem.kvtransfer.transports.agent.line import Line, check_hello
from tandem.kvtransfer.transports.agent.wire import (
    VERSION,
    Connection,
    Copied,
    Copy,
    Hello,
    Refused,
    Registered,
    Rejected,
    Take,
    agents_proof,
    consumers_proof,
)
from tandem.kvtransfer.transports.mapped.copiers import Copier, Source
from tandem.kvtransfer.transports.mapped.wire import fresh, is_proof
from tandem.protocol.ids import Incarnation

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
        self._unsaid: deque[tuple[Copy, bytes]] = deque()
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
        return [] if self._line is None or self._unsaid else [self._line.fileno()]

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
        self._unsaid.append((request, key))
        if self._line is not None:
            self._say(self._line)

    def answers(self, *, awaited: bool) -> Iterator[Copied | Refused]:
        """Yield the agent's answers; ``awaited`` if it owes one. Raises TransportError if it is
        gone."""
        if self._line is None:
            return
        self._say(self._line)
        while (message := self._line.hear()) is not None:
            self._received_at = time.monotonic()
            if self._greeted is None:
                self._register(self._line, check_hello(message))
            elif isinstance(message, Copied | Refused):
                self._check(message, self._greeted)
                yield message
            elif isinstance(message, Rejected):
                raise TransportError(f"the node's agent does not copy for us: {message.reason}")
            elif not isinstance(message, Registered):
                raise TransportError("the node's agent does not follow the protocol")
            self._say(self._line)
        if self._greeted is not None and not awaited:
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at > AGENT_SECONDS:
            raise TransportError(f"the node's agent has been silent for {AGENT_SECONDS:g} s")

    def close(self) -> None:
        """Close the connection, at which the agent releases the slots."""
        if self._line is not None:
            self._line.close()
        self._line = self.memory = self.slots = self._greeted = None
        self._unsaid.clear()
        self._asked.clear()

    def _check(self, answer: Copied | Refused, said: Connection) -> None:
        request, key = self._asked.pop(answer.number, (None, b""))
        if request is None:
            raise TransportError("the node's agent answers what it was not asked")
        if isinstance(answer, Copied):
            expected = agents_proof(key, said, request, answer.tags)
            if not is_proof(answer.proof, expected):
                raise TransportError("the node's agent has not the producer's key")

    def _register(self, line: Line, hello: Hello) -> None:
        slot_bytes, num_slots, block_bytes = self._sizes
        self.memory, self.slots = self._copier.make(slot_bytes * num_slots)
        descriptor, _ = self._copier.share(self.memory, writable=True)
        where, greeted = self._copier.where(), Connection(hello.challenge, fresh())
        try:
            named = VERSION, self._incarnation
            said = Take(*named, slot_bytes, num_slots, block_bytes, where, greeted.consumers)
            if not line.say(said, [descriptor]):
                raise TransportError("the node's agent takes no registration")
        finally:
            os.close(descriptor)
        self._greeted = greeted

    def _say(self, line: Line) -> None:
        while self._greeted is not None and self._unsaid:
            request, key = self._unsaid[0]
            proof = consumers_proof(key, self._greeted, request.producer, request.consumer)
            if not line.say(msgspec.structs.replace(request, proof=proof)):
                return
            self._asked[request.number] = self._unsaid.popleft()
