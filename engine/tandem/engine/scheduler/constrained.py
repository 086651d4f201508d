"""Requests whose tokens are constrained: planned as any other, drawn when their masks are made.

The mask of a token depends on the token before, so that masks of a step are made while its forward
runs, and its draws are told of them apart from its plan. Who is late then draws nothing, and its
position is computed again: in the next step, and who is late again, when its mask is made. Nothing
here is asked of a request without a constraint, and the planner knows of one by its ``plan_limit``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tandem.engine.request import Request
from tandem.engine.step import SeqId, StepRow, TokenMasks
from tandem.protocol.errors import Refusal, TandemError

IDLE_WAIT_SECONDS = 0.005
"""Seconds to wait for a mask where nobody else is kept from anything by it."""
MASK_SECONDS = 10.0
"""A request whose next mask is not made by then is refused."""

Ending = tuple[Request, Refusal | None]
"""A request that ends here: with None whose answer can only end, else why it cannot go on."""


class EveryToken:
    """Holds every token: any may end an answer that is constrained."""

    def __contains__(self, token: object) -> bool:
        return True


EVERY_TOKEN = EveryToken()


class Constrained:
    """The constrained requests of one engine."""

    def __init__(self) -> None:
        self._requests: dict[SeqId, Request] = {}
        self._slow: set[SeqId] = set()
        """Those who were late when they were looked at last: no step waits for them."""
        self._late: dict[SeqId, tuple[Request, int, float]] = {}
        """Requests that are not planned before their next mask is made, with the limit that they
        had, and since when, by the engine's clock."""
        self._drawing: list[Request] = []
        """Those that draw in the step that awaits masks."""
        self._others_draw = False
        """Whether that step draws for requests without a constraint, too."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._requests)

    @property
    def awaits_masks(self) -> bool:
        """Whether a planned step has not been told its masks."""
        return bool(self._drawing)

    def add(self, request: Request) -> None:
        """A request with a constraint is let in; the mask of its next token is made."""
        request.enders = EVERY_TOKEN
        self._requests[request.seq] = request

    def remove(self, request: Request) -> None:
        """A request ended."""
        del self._requests[request.seq]
        self._late.pop(request.seq, None)
        self._slow.discard(request.seq)

    def begin(self, rows: Iterable[StepRow]) -> bool:
        """A step is planned: whether it awaits masks, for rows that draw under a constraint."""
        if not self._requests:
            return False
        assert not self._drawing, "a step is planned before the last one has its masks"
        drawing = [row.seq for row in rows if row.sample_choices]
        known = self._requests
        self._drawing = [known[seq] for seq in drawing if seq in known]
        self._others_draw = len(drawing) > len(self._drawing)
        return bool(self._drawing)

    def look(self, step: int, now: float, until: float) -> tuple[TokenMasks, list[Ending]]:
        """The masks of the step that awaits them, as far as they are made by ``until`` (seconds of
        ``time.monotonic``), and who ends here: end them all."""
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
        """Let those be planned whose mask is made, and wait ``seconds`` for it. Yields those who
        end here."""
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
        """Whether anybody is not planned for want of a mask."""
        return bool(self._late)

    def _take_back(self, request: Request, now: float) -> None:
        """The request draws nothing in the step: its last token is computed once more, and not
        before its mask is made if it was late the last time, too."""
        assert request.constraint is not None
        request.num_pending -= 1
        request.num_computed -= 1
        if request.seq in self._slow:
            self._late[request.seq] = (request, request.plan_limit, now)
            request.plan_limit = 0
            request.constraint.call_when_ready()
        self._slow.add(request.seq)


def _is_made(request: Request) -> bool:
    """Whether a request's mask is made, or will never be."""
    constraint = request.constraint
    try:
        return request.finished or constraint is None or constraint.is_ready()
    except TandemError:
        return True
