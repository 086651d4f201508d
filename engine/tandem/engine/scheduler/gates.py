"""Conditions that a request waits for before blocks are reserved, or holds while it runs.

A gate is a slow or scarce resource, such as a compiled grammar or an adapter's weights. A request
at a closed gate is in no queue, so it delays no other; it later takes the place of its arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.engine.request import Gate, Request
from tandem.engine.step import SeqId
from tandem.protocol.errors import Refusal
from tandem.protocol.requests import EngineCoreRequest


class Gates:
    """Gates of one engine, and the requests that wait at them."""

    def __init__(self, gates: Sequence[Gate] = ()) -> None:
        self._gates = tuple(gates)
        self.waiting: dict[SeqId, tuple[Request, float]] = {}
        """Requests with the start of their charged wait, by the engine's clock."""
        self.num_tokens = 0
        """Prompt and forced tokens of all waiting requests."""
        self._behind: set[SeqId] = set()
        """Requests that waited for other requests at the last look."""

    def admit(self, source: EngineCoreRequest, requests: Sequence[Request]) -> Refusal | None:
        """Begin the waits of a request at its gates, or return a refusal."""
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
        """Yield each request whose wait has ended, in order of arrival, with its refusal if not
        admitted."""
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
        self._forget(request)
        self.release((request,))

    @staticmethod
    def release(requests: Sequence[Request]) -> None:
        for request in requests:
            for gate in request.group.gates:
                gate.release(request)

    def close(self) -> None:
        """Close all gates. May be called twice."""
        for gate in self._gates:
            gate.close()

    def _forget(self, request: Request) -> None:
        if self.waiting.pop(request.seq, None) is not None:
            self.num_tokens -= request.num_prefill
        self._behind.discard(request.seq)

    def _begins(self, request: Request) -> bool:
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
