"""Constrained requests: planned as any other, sampled once their masks are made.

A step's masks are made while its forward runs, and sent apart from its plan. A request whose mask
is late samples nothing; its position is computed again in the next step, or if late again, once the
mask is made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tandem.engine.request import Request
from tandem.engine.step import SeqId, StepRow, TokenMasks
from tandem.protocol.errors import Refusal, TandemError


def draws_several(request: Request) -> bool:
    """Return whether a row may sample at several positions. Grammars and logits processors handle
    one."""
    return request.constraint is None and not request.group.source.params.extra_args


IDLE_WAIT_SECONDS = 0.005
"""Seconds to wait for a mask if the wait delays no other request."""
MASK_SECONDS = 10.0
"""Seconds after which a request without its next mask is refused."""

Ending = tuple[Request, Refusal | None]
"""Request that ends here; None if its answer can only end, else the refusal."""


class EveryToken:
    """Container of every token: any may end a constrained answer."""

    def __contains__(self, token: object) -> bool:
        return True


EVERY_TOKEN = EveryToken()


class Constrained:
    """Constrained requests of one engine."""

    def __init__(self, *, has_states: bool = False) -> None:
        """``has_states``: no position is computed again, as its token would enter a recurrent state
        twice. Requests are then planned only once their mask is made."""
        self._has_states = has_states
        self._requests: dict[SeqId, Request] = {}
        self._slow: set[SeqId] = set()
        """Requests that were late at the last look: no step waits for them."""
        self._late: dict[SeqId, tuple[Request, int, float | None]] = {}
        """Requests not planned before their next mask, each with its former limit and the start of
        its wait by the engine's clock; None until its last token is known."""
        self._drawing: list[Request] = []
        self._others_draw = False
        """Whether that step also samples for requests without a constraint."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def awaits_masks(self) -> bool:
        return bool(self._drawing)

    def add(self, request: Request) -> None:
        """Add a request with a constraint, whose next mask is being made."""
        request.enders = EVERY_TOKEN
        self._requests[request.seq] = request
        if self._has_states:
            self._hold(request, None)

    def remove(self, request: Request) -> None:
        del self._requests[request.seq]
        self._late.pop(request.seq, None)
        self._slow.discard(request.seq)

    def begin(self, rows: Iterable[StepRow]) -> bool:
        """Return whether the step being planned awaits masks for its rows."""
        if not self._requests:
            return False
        assert not self._drawing, "a step is planned before the last one has its masks"
        drawing = [row.seq for row in rows if row.sample_choices]
        known = self._requests
        self._drawing = [known[seq] for seq in drawing if seq in known]
        if self._has_states:
            for request in self._drawing:
                self._hold(request, None)
        self._others_draw = len(drawing) > len(self._drawing)
        return bool(self._drawing)

    def look(self, step: int, now: float, until: float) -> tuple[TokenMasks, list[Ending]]:
        """Return the masks of the waiting step that are made by ``until`` (``time.monotonic``), and
        the requests to end."""
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
                    self._unpin(request, now)
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
        """Plan requests again whose mask is made, after a wait of up to ``seconds``; yield those
        that end."""
        until = time.monotonic() + seconds
        for seq, (request, limit, since) in list(self._late.items()):
            constraint = request.constraint
            if constraint is None or seq not in self._late:
                continue  # it ended with another choice of its request
            if request.num_output_placeholders:
                continue  # its next mask follows from a token that is not known
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
            elif since is None:
                self._late[seq] = (request, limit, now)
            elif now - since >= MASK_SECONDS:
                words = f"a format with masks made within {MASK_SECONDS:g} s per token"
                yield request, constraint.refusal(words)

    @property
    def has_late(self) -> bool:
        return bool(self._late)

    def _unpin(self, request: Request, now: float) -> None:
        """Undo the request's row, to compute its last token again; if late twice, once its mask is
        made."""
        assert request.constraint is not None
        request.num_output_placeholders -= 1
        request.num_computed -= 1
        if request.seq in self._slow:
            self._hold(request, now)
        self._slow.add(request.seq)

    def limit(self, request: Request, limit: int) -> None:
        """Set a request's ``plan_limit``, if it waits for its mask after the wait."""
        held = self._late.get(request.seq)
        if held is None:
            request.plan_limit = limit
        else:
            self._late[request.seq] = (request, limit, held[2])

    def _hold(self, request: Request, now: float | None) -> None:
        """Do not plan the request before its next mask is made."""
        assert request.constraint is not None
        self._late[request.seq] = (request, request.plan_limit, now)
        request.plan_limit = 0
        request.constraint.call_when_ready()


def _is_made(request: Request) -> bool:
    constraint = request.constraint
    try:
        return request.finished or constraint is None or constraint.is_ready()
    except TandemError:
        return True
