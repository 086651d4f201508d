"""One attempt at one request: one or two legs, and one inbox for what they say.

Knows which events end a leg, and which end the attempt; what follows from that is the
dispatcher's and the ladder's. Lives in the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from tandem.protocol.errors import FailCause
from tandem.protocol.finish import FinishReason
from tandem.protocol.ids import Incarnation
from tandem.protocol.outputs import (
    Accepted,
    EngineCoreOutput,
    Failed,
    PooledOutput,
    Refused,
)
from tandem.protocol.recording import AttemptRecord, LegRecord, Recording
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import LegTimes
from tandem.router.dispatch.failure import AttemptFailure
from tandem.router.dispatch.inbox import Backlog, Inbox
from tandem.router.placement.base import Placement
from tandem.router.workers.seams import LegEvent
from tandem.router.workers.worker import Worker

TAKEN_AFTER = 1.0
"""Seconds without a refusal after which a request counts as taken by its workers."""
BAD_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""With which an attempt has failed."""


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
    """Where a leg stands, as far as this router knows."""

    SENT = auto()
    ACCEPTED = auto()
    ENDED = auto()
    """The worker has nothing more to say about the key: no CANCEL is needed."""


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
        """Produces KV for another leg."""
        self.loads = False
        """Takes KV from another leg, instead of computing the prompt."""
        self.state = LegState.SENT
        self.counts = False
        """Among the legs under way on its worker."""
        self.spoke = False
        """An output was read."""
        self.came_at: float | None = None
        """When the first one came, read or not, by the loop's clock."""
        self.streams = False
        """Among those that decode on its worker."""
        self.num_tokens = 0
        """Prompt tokens counted on the worker until its first output."""
        self.whole_tokens = 0
        """Of the same prompt, cached ones included."""
        self.record: LegRecord | None = None
        """Where its times are kept, if they are."""

    def receive(self, event: LegEvent) -> None:
        """Called by the connection."""
        record = self.record
        if record is not None and record.first is None:
            now = time.monotonic()
            if type(event) is Accepted:
                record.accepted = now
            elif isinstance(event, EngineCoreOutput | PooledOutput):
                record.first = now
        self.attempt.receive(self, event)

    def timed(self, times: LegTimes) -> None:
        """Called by the connection."""
        if self.record is not None:
            self.record.times, self.record.heard = times, time.monotonic()

    def let_go(self) -> None:
        """The attempt no longer counts on its worker. May be called twice."""
        self.counted_off()
        if self.streams:
            self.streams = False
            self.worker.num_streams -= 1
        if self.counts:
            self.counts = False
            self.worker.num_legs -= 1

    def begins(self) -> None:
        """The first output came: it decodes there from now on, unless the KV goes elsewhere."""
        if self.is_prefill:
            self.let_go()
            return
        self.counted_off()
        if self.counts:
            self.streams = True
            self.worker.num_streams += 1

    def counted_off(self) -> None:
        """The first output came, or the attempt ended: its prompt no longer waits there."""
        if self.num_tokens:
            self.worker.leg_prompts -= 1
        self._count(-self.num_tokens, -self.whole_tokens)
        self.num_tokens = self.whole_tokens = 0

    def counted_on(self, num_prompt: int, num_cached: int) -> None:
        """The prompt waits on its worker from now on, to be computed or brought."""
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
        """``all_said`` is called when the workers have said all of ``num_open`` choices, read or
        not; ``overflow`` when too much waits to be read."""
        self.number = number
        self.placement = placement
        self.legs: list[Leg] = []
        self.started_at = loop.time()
        self.heard_at = self.started_at
        """Last event that came, read or not: a slow client is not the worker's silence."""
        self.decoding = False
        """The worker that runs to the end has spoken: the hand-off, if any, is over."""
        self._loop = loop
        self._inbox: Inbox[Leg] = Inbox(backlog or Backlog(), overflow, tenant)
        self._open = num_open
        self._ended: set[int] = set()
        self._all_said = all_said
        self.explained: Explained | None = None
        """What was expected of it; set when it is sent."""
        self.given_up: AttemptFailure | None = None
        """Set from outside when a deadline of the attempt passed."""
        self._waiter: asyncio.Future[None] | None = None
        self._held: asyncio.TimerHandle | None = None
        """The first token is here, and is read no sooner than this ends, or the second is here."""
        self.record: AttemptRecord | None = None
        """Where its times are kept, if they are."""

    def start(
        self,
        legs: list[tuple[Worker, EngineCoreRequest]],
        hits: Mapping[Incarnation, int] | None = None,
    ) -> AttemptFailure | None:
        """Send all legs at once; the failure when a worker's link is down. ``hits``: tokens that
        workers have cached, which wait for nobody."""
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
        """Called by a leg, in the order of arrival over both."""
        self.heard_at = self._loop.time()
        self._inbox.put(leg, event)
        if type(event) is EngineCoreOutput or type(event) is PooledOutput:
            if leg.came_at is None:
                leg.came_at = self.heard_at
                leg.begins()
                if leg.is_prefill and all(each.came_at is None for each in self.legs[1:]):
                    self._hold()
            if event.finish is not None and event.finish not in BAD_ENDS:
                self._choice_ended(event.choice)
            if event.finish is not None or not leg.is_prefill:
                self.let_go()
        elif type(event) is not Accepted:
            self.let_go()
        self.wake()

    def _hold(self) -> None:
        forecast = self.placement.forecast
        if forecast is None:
            return
        # It may have come later than was forecast: then it is held for less, or not at all.
        seconds = min(forecast.hold, self.started_at + forecast.hold_until - self._loop.time())
        if seconds > 0:
            self._held = self._loop.call_later(seconds, self.let_go)

    def let_go(self) -> None:
        """Whatever came may be read."""
        if self._held is not None:
            self._held.cancel()
            self._held = None
            self.wake()

    def _choice_ended(self, choice: int) -> None:
        """By a worker's word, or its reader's. When all have, the workers are free, however long
        the client takes to read."""
        if choice in self._ended:
            return
        self._ended.add(choice)
        if len(self._ended) == self._open:
            for leg in self.legs:
                leg.let_go()
            self._all_said()

    def end_choices(self, request: str, choices: tuple[int, ...]) -> None:
        """Their reader has found their end: whoever computes them, beside others, lets go of them.
        P hands all of them over, whatever becomes of them."""
        for choice in choices:
            self._choice_ended(choice)
        for leg in self.legs:
            worker, goes_on = leg.worker, leg.state is not LegState.ENDED
            if goes_on and not leg.is_prefill and worker.card.ends_choices:
                worker.connection.end_choices(request, self.number, choices)

    def give_up(self, failure: AttemptFailure) -> None:
        """A deadline of the attempt passed."""
        self.given_up = failure
        self.wake()

    def wake(self) -> None:
        """Let ``wait`` return."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def pop(self) -> tuple[Leg, LegEvent] | None:
        """The next event, or None when all were read that may be."""
        return self._inbox.pop() if self._held is None else None

    async def wait(self, recording: Recording | None = None) -> None:
        """Return when there may be events, or ``wake`` was called."""
        if not self._inbox or self._held is not None:
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
        """What an event without tokens means: the attempt's failure, or None when it goes on."""
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
        """An output of ``leg`` was read."""
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
        """The attempt's failure by ``leg``; ``own``: whatever its cause, not the link's fault, as
        all is that a decode worker fails with once it has spoken."""
        return AttemptFailure(
            worker=leg.worker.incarnation,
            worker_name=leg.worker.name,
            pair=None if own else self.placement.pair,
            message=message,
            cause=cause,
        )

    def overslept(self, seconds: float) -> None:
        """The router stood still for so long, up to now: that time is not the workers' silence.
        What came when it went on came behind that."""
        now = self._loop.time()
        self.started_at += min(seconds, now - self.started_at)
        self.heard_at += min(seconds, now - self.heard_at)
        for leg in self.legs:
            if leg.came_at is not None:
                leg.came_at += min(seconds, now - leg.came_at)

    def judge_reader(self, *, stood_still: bool) -> None:
        """Call it now and then; see ``Inbox.judge``."""
        self._inbox.judge(stood_still=stood_still)

    def overdue(self, now: float, *, accept: float, progress: float) -> AttemptFailure | None:
        """The failure when a worker did not accept or say a token in time."""
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
            self.heard_at = now  # the time for its first token begins when it leaves the queue
        elif now - self.heard_at > progress:
            message = f"no token in {progress:g} s"
            return self.failure(self.legs[-1], FailCause.TIMEOUT, message, own=self.decoding)
        return None

    @property
    def _queued(self) -> bool:
        """Nobody spoke yet, and a worker says that some wait there: it is in that queue, which
        moves (or the worker is lost as stalled), and its deadline bounds the wait."""
        if any(leg.spoke for leg in self.legs):
            return False
        loads = [leg.worker.load for leg in self.legs]
        return any(load is not None and load.num_waiting for load in loads)

    def end(self, request: str, *, finished: bool) -> None:
        """Want no more events. CANCEL goes to every leg that may still hold something.

        ``finished``: workers have ended all choices. Then legs that spoke have let go by
        themselves, unless token 1 ended it all: D waits, or P waits for D.
        """
        for leg in self.legs:
            let_go = leg.state is LegState.ENDED or (finished and self.decoding and leg.spoke)
            leg.let_go()
            leg.worker.connection.release(request, self.number, cancel=not let_go)
        self.legs = []
        self.let_go()
        self._inbox.clear()
