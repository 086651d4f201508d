"""What a request waits for before anything is reserved for it, or holds while it lives.

A gate is one slow or scarce thing: a grammar that is compiled, later an adapter's weights, media, a
share of an encoder. The plan loop knows none of them: a request whose gates are not all open is in
no queue, so that nobody behind it waits because of it, and then takes the place that its arrival
gives it. A request that no gate asks for passes them all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from tandem.engine.request import Request
from tandem.engine.step import SeqId
from tandem.protocol.errors import Refusal
from tandem.protocol.requests import EngineCoreRequest


class Gate(Protocol):
    """Called by the scheduler in its step loop; never blocks. For one sequence: ``admit``, then
    ``failed`` and ``ready`` until it is one of them, ``enter``, and ``release`` at its end,
    whatever came before. A preemption changes nothing: what was entered stays until ``release``."""

    @property
    def seconds(self) -> float:
        """How long a request may wait here."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Whether the gate makes what it makes once, for all that will come: time that no request
        is charged with."""
        ...

    def asks(self, source: EngineCoreRequest) -> bool:
        """Whether a request has to pass here; if not, it is never heard of again."""
        ...

    def admit(self, request: Request) -> Refusal | None:
        """Begin what is slow, or say why not; then nothing is held."""
        ...

    def waits(self, request: Request) -> bool:
        """Whether others are before it, so that nobody is at work for it: such time is not charged
        to the work."""
        ...

    def failed(self, request: Request) -> Refusal | None:
        """Why it never opens, which ends the request."""
        ...

    def ready(self, request: Request) -> bool:
        """Whether it is open."""
        ...

    def overdue(self, request: Request) -> Refusal:
        """What to tell a request that waited for ``seconds``: for others, or for its own."""
        ...

    def enter(self, request: Request) -> None:
        """All gates are open: give the request what it came for."""
        ...

    def forked(self, parent: Request, child: Request) -> None:
        """``child`` goes on from where ``parent`` is, and holds the same from now on."""
        ...

    def release(self, request: Request) -> None:
        """The request ended, or it was never let in."""
        ...

    def close(self) -> None:
        """The engine ends. May be called twice."""
        ...


class TokenConstraint(Protocol):
    """Which tokens a request may get: what a gate may leave in ``Request.constraint``. A mask is
    made after each token, and the next is drawn when it is there. Methods raise TandemError when
    the tokens cannot be followed."""

    @property
    def mask(self) -> bytes | bytearray:
        """Of the next token, a row of ``TokenMasks.words``; once ``is_ready``."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether no token may come next; once ``is_ready``."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether the answer so far can only end."""
        ...

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether the next token's mask is made, waited for so long."""
        ...

    def call_when_ready(self) -> None:
        """Have the step loop woken once the mask is made: nobody looks for it meanwhile."""
        ...

    def accept(self, token: int, *, last: bool = False) -> bool:
        """The answer went on by ``token``, its ``last`` one or not; whether it can only end now."""
        ...

    def ends_with(self, token: int) -> bool:
        """Whether it could only end after ``token``, which is not taken."""
        ...

    def fork(self) -> Self:
        """A constraint of another choice, which stands where this one does."""
        ...

    def drop(self) -> object:
        """The request ended: whatever is left for the gate."""
        ...

    def refusal(self, words: str) -> Refusal:
        """How a request ends whose tokens cannot be followed further."""
        ...


class Gates:
    """The gates of one engine, and who waits at them."""

    def __init__(self, gates: Sequence[Gate] = ()) -> None:
        self._gates = tuple(gates)
        self.waiting: dict[SeqId, tuple[Request, float]] = {}
        """With the time from which each is charged for its waiting, by the engine's clock."""
        self.num_tokens = 0
        """Prompt and forced tokens of all that wait."""
        self._behind: set[SeqId] = set()
        """Of those, who waited for others when last looked at."""

    def admit(self, source: EngineCoreRequest, requests: Sequence[Request]) -> Refusal | None:
        """Bring the sequences of a request to the gates that ask for it, or say why not."""
        asked = tuple(gate for gate in self._gates if gate.asks(source))
        if not asked:
            return None
        begun: list[tuple[Gate, Request]] = []
        for request in requests:
            for gate in asked:
                refusal = gate.admit(request)
                if refusal is not None:
                    for each, of in begun:
                        each.release(of)
                    return refusal
                begun.append((gate, request))
        requests[0].group.gates = asked
        return None

    def wait(self, request: Request, now: float) -> None:
        """Keep a request that has gates aside until all are open."""
        self.waiting[request.seq] = (request, now)
        self.num_tokens += request.num_prefill

    def look(self, now: float) -> Iterator[tuple[Request, Refusal | None]]:
        """Requests whose waiting is over, in the order in which they came: let in, or why they are
        not. Each is seen once."""
        for request, since in list(self.waiting.values()):
            if request.seq not in self.waiting:
                continue  # it ended with another choice of its request
            if self._begins(request) or any(gate.is_preparing for gate in request.group.gates):
                self.waiting[request.seq] = (request, since := now)
            refusal = self._refusal(request, now - since)
            if refusal is None and not all(gate.ready(request) for gate in request.group.gates):
                continue
            self._forget(request)
            if refusal is None:
                for gate in request.group.gates:
                    gate.enter(request)
            yield request, refusal

    def leave(self, request: Request) -> None:
        """A request that has gates ended."""
        self._forget(request)
        self.release((request,))

    @staticmethod
    def release(requests: Sequence[Request]) -> None:
        """Let go of what sequences hold."""
        for request in requests:
            for gate in request.group.gates:
                gate.release(request)

    def close(self) -> None:
        """The engine ends. May be called twice."""
        for gate in self._gates:
            gate.close()

    def _forget(self, request: Request) -> None:
        """A request no longer waits, if it did."""
        if self.waiting.pop(request.seq, None) is not None:
            self.num_tokens -= request.num_prefill
        self._behind.discard(request.seq)

    def _begins(self, request: Request) -> bool:
        """Whether a request waited for others until now, and no longer does."""
        if any(gate.waits(request) for gate in request.group.gates):
            self._behind.add(request.seq)
            return False
        was_behind = request.seq in self._behind
        self._behind.discard(request.seq)
        return was_behind

    @staticmethod
    def _refusal(request: Request, waited: float) -> Refusal | None:
        for gate in request.group.gates:
            refusal = gate.failed(request)
            if refusal is None and waited >= gate.seconds and not gate.ready(request):
                refusal = gate.overdue(request)
            if refusal is not None:
                return refusal
        return None
