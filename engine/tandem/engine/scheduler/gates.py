"""What a request waits for before anything is reserved for it, or holds while it lives.

A gate is one slow or scarce thing: a grammar that is compiled, later an adapter's weights, media, a
share of an encoder. The plan loop knows none of them: a request whose gates are not all open is in
no queue, so that nobody behind it waits because of it, and then takes the place that its arrival
gives it. A request that no gate asks for passes them all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.engine.request import Gate, Request
from tandem.engine.step import SeqId
from tandem.protocol.errors import Refusal
from tandem.protocol.requests import EngineCoreRequest


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
