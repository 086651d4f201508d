"""Constrained requests: planned as any other, sampled once their masks are made.

The mask of a token depends on the token before it. Masks of a step are therefore made while its
forward runs, and sent apart from its plan. A request whose mask is late samples nothing, and its
position is computed again in the next step. If late again, it is computed once its mask is made.
Requests without a constraint are not touched. The planner sees a constraint only by ``plan_limit``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tandem.engine.request import Request
from tandem.engine.step import SeqId, StepRow, TokenMasks
from tandem.protocol.errors import Refusal, TandemError

IDLE_WAIT_SECONDS = 0.005
"""Seconds to wait for a mask if the wait delays no other request."""
MASK_SECONDS = 10.0
"""Seconds after which a request whose next mask is not made is refused."""

Ending = tuple[Request, Refusal | None]
"""A request that ends here. None: its answer can only end; else the refusal."""


class EveryToken:
    """A container of every token: any may end a constrained answer."""

    def __contains__(self, token: object) -> bool:
        return True


EVERY_TOKEN = EveryToken()


class Constrained:
    """The constrained requests of one engine."""

    def __init__(self) -> None:
        self._requests: dict[SeqId, Request] = {}
        self._slow: set[SeqId] = set()
        """Requests that were late at the last look: no step waits for them."""
        self._late: dict[SeqId, tuple[Request, int, float]] = {}
        """Requests that are not planned before their next mask is made; each with its former limit
        and the start of its wait, by the engine's clock."""
        self._drawing: list[Request] = []
        """Requests that sample in the step that awaits masks."""
        self._others_draw = False
        """True if that step also samples for requests without a constraint."""

    def __len__(self) -> int:
        """Return the number of constrained requests."""
        return len(self._requests)

    @property
    def awaits_masks(self) -> bool:
        """Return whether a planned step has not received its masks."""
        return bool(self._drawing)

    def add(self, request: Request) -> None:
        """Add a request with a constraint; the mask of its next token is being made."""
        request.enders = EVERY_TOKEN
        self._requests[request.seq] = request

    def remove(self, request: Request) -> None:
        """Remove a request that ended."""
        del self._requests[request.seq]
        self._late.pop(request.seq, None)
        self._slow.discard(request.seq)

    def begin(self, rows: Iterable[StepRow]) -> bool:
        """Return whether the step that was planned awaits masks, for rows that sample under a
        constraint."""
        if not self._requests:
            return False
        assert not self._drawing, "a step is planned before the last one has its masks"
        drawing = [row.seq for row in rows if row.sample_choices]
        known = self._requests
        self._drawing = [known[seq] for seq in drawing if seq in known]
        self._others_draw = len(drawing) > len(self._drawing)
        return bool(self._drawing)

    def look(self, step: int, now: float, until: float) -> tuple[TokenMasks, list[Ending]]:
        """Return the masks of the waiting step that are made by ``until`` (seconds of
        ``time.monotonic``), and the requests that the caller has to end."""
        drawing, self._drawing = self._drawing, []
        made, late, ended = [], [], list[Ending]()
        patient = not self._others_draw and not any(map(_is_made, drawing))
        if patient:
            until = max(until, time.monotonic() + IDLE_WAIT_SECONDS)
        elif self._slow:
            drawing.sort(key=lambda each: each.seq in self._slow)
        for request in drawing:
            if request.finished or request.constraint is None:
                continue
            waits = patient or request.seq not in self._slow
            try:
                if not request.constraint.is_ready(until - time.monotonic() if waits else 0.0):
                    self._take_back(request, now)
                    late.append(request.seq)
                elif request.constraint.is_dead:
                    ended.append((request, None))
                else:
                    self._slow.discard(request.seq)
                    made.append(request)
            except TandemError as error:
                ended.append((request, request.constraint.refusal(str(error))))
        words = bytearray().join(
            each.constraint.mask for each in made if each.constraint is not None
        )
        return TokenMasks(step, tuple(each.seq for each in made), words, tuple(late)), ended

    def look_at_late(self, now: float, seconds: float) -> Iterator[Ending]:
        """Allow planning of requests whose mask is made, waiting up to ``seconds``. Yield those
        that end."""
        until = time.monotonic() + seconds
        for seq, (request, limit, since) in list(self._late.items()):
            constraint = request.constraint
            if constraint is None or seq not in self._late:
                continue  # it ended with another choice of its request
            try:
                ready = constraint.is_ready(max(0.0, until - time.monotonic()))
            except TandemError as error:
                yield request, constraint.refusal(str(error))
                continue
            if ready:
                del self._late[seq]
                if constraint.is_dead:
                    yield request, None
                else:
                    request.plan_limit = limit
            elif now - since >= MASK_SECONDS:
                words = f"what can be followed within {MASK_SECONDS:g} s a token"
                yield request, constraint.refusal(words)

    @property
    def has_late(self) -> bool:
        """Return whether a request is not planned because its mask is not made."""
        return bool(self._late)

    def _take_back(self, request: Request, now: float) -> None:
        """Undo the request's row: its last token is computed again. If it was late the last time
        too, that happens only once its mask is made."""
        assert request.constraint is not None
        request.num_pending -= 1
        request.num_computed -= 1
        if request.seq in self._slow:
            self._late[request.seq] = (request, request.plan_limit, now)
            request.plan_limit = 0
            request.constraint.call_when_ready()
        self._slow.add(request.seq)


def _is_made(request: Request) -> bool:
    """Return whether a request's mask is made, or will never be."""
    constraint = request.constraint
    try:
        return request.finished or constraint is None or constraint.is_ready()
    except TandemError:
        return True
