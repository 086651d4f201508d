"""Requests whose tokens are constrained: planned when their last token is known and its mask made.

A step is planned while the one before it runs, and the mask of a token depends on the token before:
such a request is in every other step of a busy engine. That costs the others nothing, who are
planned as ever: nothing here is asked of a request without a constraint, and the planner knows of
it by ``plan_limit`` alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tandem.engine.request import Request
from tandem.engine.step import SeqId, StepRow, TokenMasks
from tandem.protocol.errors import Refusal, TandemError

WAIT_SECONDS = 0.001
"""How long a plan waits for masks, all together: most take a tenth of that, and the device is busy
with the step before."""
IDLE_WAIT_SECONDS = 0.005
"""Seconds to wait for a mask where nothing else could be planned."""
MASK_SECONDS = 10.0
"""A request whose next mask is not made by then is refused."""


class EveryToken:
    """Holds every token: any may end an answer that is constrained."""

    def __contains__(self, token: object) -> bool:
        return True


EVERY_TOKEN = EveryToken()


class Constrained:
    """The constrained requests of one engine."""

    def __init__(self) -> None:
        self._requests: dict[SeqId, Request] = {}
        self._awaited: dict[SeqId, tuple[Request, float | None]] = {}
        """Requests whose next mask is being made, and since when it was looked for, by the engine's
        clock."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """A request with a constraint is let in; the mask of its next token is made."""
        request.enders = EVERY_TOKEN
        request.plan_limit = min(request.plan_limit, len(request.token_ids) + 1)
        self._requests[request.seq] = request

    def remove(self, request: Request) -> None:
        """A request ended."""
        del self._requests[request.seq]
        self._awaited.pop(request.seq, None)

    def hold(self, request: Request) -> None:
        """An answer went on by a token: nothing is planned of it until the next mask is made."""
        request.plan_limit = 0
        self._awaited[request.seq] = (request, None)

    def look(self, now: float, seconds: float) -> Iterator[tuple[Request, Refusal | None]]:
        """Let those be planned whose mask is made, and wait ``seconds`` for it. Yields those who
        end here: with None whose answer can only end, else why it cannot go on."""
        until = time.monotonic() + seconds
        for seq, (request, since) in list(self._awaited.items()):
            constraint = request.constraint
            if constraint is None or seq not in self._awaited:
                continue
            try:
                ready = constraint.is_ready(max(0.0, until - time.monotonic()))
            except TandemError as error:
                yield request, constraint.refusal(str(error))
                continue
            if ready:
                del self._awaited[seq]
                if constraint.is_dead:
                    yield request, None
                else:
                    request.plan_limit = min(request.max_len, len(request.token_ids) + 1)
            elif since is None:
                self._awaited[seq] = (request, now)
            elif now - since >= MASK_SECONDS:
                words = f"what can be followed within {MASK_SECONDS:g} s a token"
                yield request, constraint.refusal(words)

    def masks(self, rows: Iterable[StepRow]) -> TokenMasks | None:
        """Masks of the rows that draw under a constraint."""
        if not self._requests:
            return None
        drawing = [
            self._requests[row.seq]
            for row in rows
            if row.sample_choices and row.seq in self._requests
        ]
        if not drawing:
            return None
        words = b"".join(each.constraint.mask for each in drawing if each.constraint is not None)
        return TokenMasks(tuple(each.seq for each in drawing), words)
