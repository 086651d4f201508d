"""One attempt at one request: one or two legs, and one inbox for their events.

Defines which events end a leg, and which end the attempt; the dispatcher and the retry policy
decide on the consequences. Used in the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation
from tandem.protocol.outputs import (
    Accepted,
    EngineCoreOutput,
    Failed,
    FinishReason,
    PooledOutput,
    Refused,
)
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import LegTimes
from tandem.router.dispatch.failure import AttemptFailure
from tandem.router.dispatch.inbox import Backlog, Inbox
from tandem.router.placement.policy import Placement
from tandem.router.workers.connection import LegEvent
from tandem.router.workers.worker import Worker
from tandem.tracing.recording import AttemptRecord, LegRecord, Recording

TAKEN_AFTER = 1.0
"""Seconds without a refusal after which a request counts as taken by its workers."""
BAD_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""Finish reasons of a failed attempt."""


@dataclass(slots=True)
class Explained:
    """One attempt: its placement, and the times that it took in seconds."""

    request: str
    attempt: int
    num_prompt: int
    placement: Placement
    tenant: str = ""
    ttft: float | None = None
    second: float | None = None


class LegState(Enum):
    """State of a leg, as far as this router knows."""

    SENT = auto()
    ACCEPTED = auto()
    ENDED = auto()
    """The worker sends nothing more for the key: no CANCEL is required."""


class Leg:
    """The part of an attempt that runs on one worker; the ``Sink`` of its events."""

    __slots__ = (
        "attempt",
        "came_at",
        "counts",
        "is_prefill",
        "loads",
        "num_tokens",
        "record",
        "spoke",
        "state",
        "streams",
        "whole_tokens",
        "worker",
    )

    def __init__(self, attempt: Attempt, worker: Worker, *, is_prefill: bool) -> None:
        self.attempt = attempt
        self.worker = worker
        self.is_prefill = is_prefill
        """True if it produces KV for another leg."""
        self.loads = False
        """True if it loads KV from another leg, instead of computing the prompt."""
        self.state = LegState.SENT
        self.counts = False
        """True if it counts among its worker's legs."""
        self.spoke = False
        """True if an output was read."""
        self.came_at: float | None = None
        """Time at which the first output came, read or not, by the loop's clock."""
        self.streams = False
        """True if it counts among its worker's decoding legs."""
        self.num_tokens = 0
        """Prompt tokens counted on the worker until its first output."""
        self.whole_tokens = 0
        """Tokens of the same prompt, cached ones included."""
        self.record: LegRecord | None = None
        """Record of its times, if they are kept."""

    def receive(self, event: LegEvent) -> None:
        """Handle an event; called by the connection."""
        record = self.record
        if record is not None and record.first is None:
            now = time.monotonic()
            if type(event) is Accepted:
                record.accepted = now
            elif isinstance(event, EngineCoreOutput | PooledOutput):
                record.first = now
        self.attempt.receive(self, event)

    def timed(self, times: LegTimes) -> None:
        """Record the worker's times; called by the connection."""
        if self.record is not None:
            self.record.times, self.record.heard = times, time.monotonic()

    def let_go(self) -> None:
        """Stop counting the leg on its worker. May be called twice."""
        self.counted_off()
        if self.streams:
            self.streams = False
            self.worker.num_streams -= 1
        if self.counts:
            self.counts = False
            self.worker.num_legs -= 1

    def begins(self) -> None:
        """Note the first output: the leg decodes here from now on, unless the KV is sent on."""
        if self.is_prefill:
            self.let_go()
            return
        self.counted_off()
        if self.counts:
            self.streams = True
            self.worker.num_streams += 1

    def counted_off(self) -> None:
        """Stop counting the prompt as waiting: the first output came, or the attempt ended."""
        if self.num_tokens:
            self.worker.leg_prompts -= 1
        self._count(-self.num_tokens, -self.whole_tokens)
        self.num_tokens = self.whole_tokens = 0

    def counted_on(self, num_prompt: int, num_cached: int) -> None:
        """Count the prompt as waiting on its worker, to be computed or loaded."""
        self.num_tokens, self.whole_tokens = max(1, num_prompt - num_cached), num_prompt
        self._count(self.num_tokens, self.whole_tokens)
        self.worker.leg_prompts += 1

    def _count(self, tokens: int, whole: int) -> None:
        worker = self.worker
        worker.leg_tokens += tokens
        worker.leg_whole_tokens += whole
        if not self.loads:
            worker.leg_compute_tokens += tokens
            worker.leg_whole_compute_tokens += whole


class Attempt:
    """Submit with ``start``; read with ``pop`` or ``wait``; always ``end`` it."""

    def __init__(
        self,
        number: int,
        placement: Placement,
        loop: asyncio.AbstractEventLoop,
        *,
        backlog: Backlog | None = None,
        tenant: str = "",
        num_open: int = 1,
        all_said: Callable[[], None] = lambda: None,
        overflow: Callable[[], None] = lambda: None,
    ) -> None:
        """``all_said`` is called when the workers have ended all of ``num_open`` choices, read or
        not; ``overflow`` if too much is unread."""
        self.number = number
        self.placement = placement
        self.legs: list[Leg] = []
        self.started_at = loop.time()
        self.received_at = self.started_at
        """Time of the last event, read or not: a slow client does not make the worker silent."""
        self.decoding = False
        """True if the worker that runs to the end has sent an output: a hand-off is then over."""
        self._loop = loop
        self._inbox: Inbox[Leg] = Inbox(backlog or Backlog(), overflow, tenant)
        self._open = num_open
        self._ended: set[int] = set()
        self._all_said = all_said
        self.explained: Explained | None = None
        """Forecast of the attempt; set when it is sent."""
        self.given_up: AttemptFailure | None = None
        """Failure set when a deadline of the attempt passed."""
        self._waiter: asyncio.Future[None] | None = None
        self.record: AttemptRecord | None = None
        """Record of its times, if they are kept."""

    def start(
        self,
        legs: list[tuple[Worker, EngineCoreRequest]],
        hits: Mapping[Incarnation, int] | None = None,
    ) -> AttemptFailure | None:
        """Send all legs at once; return the failure if a worker's link is down. ``hits``: tokens
        that workers have cached, which need no computing."""
        for worker, request in legs:
            leg = Leg(self, worker, is_prefill=len(legs) == 2 and not self.legs)
            self.legs.append(leg)
            leg.loads = len(legs) == 2 and not leg.is_prefill
            cached = 0 if hits is None else hits.get(worker.incarnation, 0)
            worker.num_legs += 1
            leg.counts = True
            leg.counted_on(len(request.prompt_token_ids), cached)
            if not worker.connection.submit(request, leg):
                leg.state = LegState.ENDED
                failure = self.failure(leg, FailCause.WORKER_LOST, "its link is down")
                return replace(failure, unsent=True)
        return None

    def receive(self, leg: Leg, event: LegEvent) -> None:
        """Handle a leg's event, in the order of arrival over both legs."""
        self.received_at = self._loop.time()
        self._inbox.put(leg, event)
        if type(event) is EngineCoreOutput or type(event) is PooledOutput:
            if leg.came_at is None:
                leg.came_at = self.received_at
                leg.begins()
            if event.finish is not None and event.finish not in BAD_ENDS:
                self._choice_ended(event.choice)
        self.wake()

    def _choice_ended(self, choice: int) -> None:
        """Note a choice's end, by its worker or its reader. After the last, the workers count as
        free, however long the client reads."""
        if choice in self._ended:
            return
        self._ended.add(choice)
        if len(self._ended) == self._open:
            for leg in self.legs:
                leg.let_go()
            self._all_said()

    def end_choices(self, request: str, choices: tuple[int, ...]) -> None:
        """End choices whose reader has found their end: their decode workers drop them. P hands all
        choices over in any case."""
        for choice in choices:
            self._choice_ended(choice)
        for leg in self.legs:
            worker, goes_on = leg.worker, leg.state is not LegState.ENDED
            if goes_on and not leg.is_prefill and worker.card.ends_choices:
                worker.connection.end_choices(request, self.number, choices)

    def give_up(self, failure: AttemptFailure) -> None:
        """Give the attempt up, as one of its deadlines passed."""
        self.given_up = failure
        self.wake()

    def wake(self) -> None:
        """Let ``wait`` return."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def pop(self) -> tuple[Leg, LegEvent] | None:
        """Return the next event, or None."""
        return self._inbox.pop()

    async def wait(self, recording: Recording | None = None) -> None:
        """Return when there may be events, or after ``wake``."""
        if not self._inbox:
            since = 0.0 if recording is None else time.monotonic()
            self._waiter = self._loop.create_future()
            self._inbox.awaited = True
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._inbox.awaited = False
                if recording is not None:
                    now = time.monotonic()
                    if now - since > recording.least_gap:
                        recording.waited(since, now)
                    else:  # once a token: no call for one that is not among the longest
                        recording.wait_seconds += now - since

    def judge(self, leg: Leg, event: Accepted | Refused | Failed) -> AttemptFailure | None:
        """Return the attempt's failure by an event without tokens, or None if it continues."""
        if isinstance(event, Accepted):
            if leg.state is LegState.SENT:
                leg.state = LegState.ACCEPTED
            return None
        leg.state = LegState.ENDED
        if leg.is_prefill and self.decoding:
            return None  # D has the KV; P no longer matters
        if isinstance(event, Refused):
            return AttemptFailure(
                worker=leg.worker.incarnation,
                worker_name=leg.worker.name,
                pair=self.placement.pair,
                message=event.refusal.message,
                refusal=event.refusal,
            )
        return self.failure(leg, event.cause, event.message, own=self.decoding)

    @property
    def is_accepted(self) -> bool:
        """Return whether all workers have accepted it."""
        return all(leg.state is not LegState.SENT for leg in self.legs)

    def had_time(self, now: float) -> bool:
        """Return whether its workers have had time enough to refuse it."""
        return now - self.started_at > TAKEN_AFTER

    def heard(self, leg: Leg) -> None:
        """Note that an output of ``leg`` was read."""
        if leg.spoke:
            return
        leg.spoke = True
        leg.counted_off()
        if not leg.is_prefill:
            self.decoding = True
        if leg.state is LegState.SENT:
            leg.state = LegState.ACCEPTED

    def failure(
        self, leg: Leg, cause: FailCause, message: str, *, own: bool = False
    ) -> AttemptFailure:
        """Return the attempt's failure by ``leg``. ``own``: the link is not at fault, as for every
        failure of a decode worker after its first output."""
        return AttemptFailure(
            worker=leg.worker.incarnation,
            worker_name=leg.worker.name,
            pair=None if own else self.placement.pair,
            message=message,
            cause=cause,
        )

    def overslept(self, seconds: float) -> None:
        """Exclude a time in which the router stood still from the workers' silence. Events that
        came after it moved later by as much."""
        now = self._loop.time()
        self.started_at += min(seconds, now - self.started_at)
        self.received_at += min(seconds, now - self.received_at)
        for leg in self.legs:
            if leg.came_at is not None:
                leg.came_at += min(seconds, now - leg.came_at)

    def judge_reader(self, *, stood_still: bool) -> None:
        """Call ``Inbox.judge``; called periodically."""
        self._inbox.judge(stood_still=stood_still)

    def overdue(self, now: float, *, accept: float, progress: float) -> AttemptFailure | None:
        """Return the failure if a worker did not accept or send a token in time."""
        if self._inbox:
            return None
        if now - self.started_at > accept:
            for leg in self.legs:
                if leg.state is LegState.SENT and not (leg.is_prefill and self.decoding):
                    # The worker's fault, not its link's: no pair.
                    return self.failure(
                        leg, FailCause.TIMEOUT, f"not accepted in {accept:g} s", own=True
                    )
        if self._queued:
            self.received_at = now  # the time for its first token begins when it leaves the queue
        elif now - self.received_at > progress:
            message = f"no token in {progress:g} s"
            return self.failure(self.legs[-1], FailCause.TIMEOUT, message, own=self.decoding)
        return None

    @property
    def _queued(self) -> bool:
        """Return whether no leg has sent an output and a worker reports a queue. The queue moves
        (or the worker is lost as stalled), and the deadline bounds the wait."""
        if any(leg.spoke for leg in self.legs):
            return False
        loads = [leg.worker.load for leg in self.legs]
        return any(load is not None and load.num_waiting for load in loads)

    def end(self, request: str, *, finished: bool) -> None:
        """Stop receiving events. CANCEL is sent to every leg that may still hold something.

        ``finished``: workers have ended all choices. Then legs with an output have released their
        parts, unless token 1 ended all: D waits, or P waits for D.
        """
        for leg in self.legs:
            let_go = leg.state is LegState.ENDED or (finished and self.decoding and leg.spoke)
            leg.let_go()
            leg.worker.connection.release(request, self.number, cancel=not let_go)
        self.legs = []
        self._inbox.clear()
