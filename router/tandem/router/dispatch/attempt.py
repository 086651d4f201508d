"""One attempt at one request: one or two legs, and one inbox for their events.

Defines the events that end a leg or the attempt. Used in the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Generic, TypeVar

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
from tandem.protocol.timeline import LegTimes, Watch
from tandem.router.dispatch.retry_policy import AttemptFailure, AttemptKind
from tandem.router.placement.policy import Placement
from tandem.router.workers.connection import LegEvent, Worker
from tandem.tracing.recording import AttemptRecord, LegRecord, Recording

_EVENT_BYTES = 400
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 120
_MOST = 2
"""Multiple of the total limit from which answers being read may be given up, too."""
_LOOKS = 64
"""Maximum searches of all inboxes while their bytes grow by the limit."""

_Leg = TypeVar("_Leg")


def weigh(event: LegEvent) -> int:
    """Return the approximate memory of an event in bytes."""
    if type(event) is PooledOutput:
        return _EVENT_BYTES + len(event.values)
    if type(event) is not EngineCoreOutput:
        return _EVENT_BYTES
    size = _EVENT_BYTES + _TOKEN_BYTES * len(event.token_ids)
    for logprobs in (event.logprobs, event.prompt_logprobs):
        if logprobs:
            last = logprobs[-1]
            each = 1 if last is None else 1 + len(last.top_ids)
            size += _LOGPROB_BYTES * each * len(logprobs)
    return size


class Backlog:
    """Counts of all inboxes."""

    def __init__(self, *, stream_bytes: int = 4 << 20, total_bytes: int = 256 << 20) -> None:
        self.stream_bytes = stream_bytes
        self.total_bytes = total_bytes
        self.held = 0
        self._look_beyond = total_bytes
        """Bytes in all inboxes from which an answer to give up is searched for."""
        self._inboxes: set[Inbox[object]] = set()

    def enter(self, inbox: Inbox[object]) -> None:
        self._inboxes.add(inbox)

    def leave(self, inbox: Inbox[object]) -> None:
        self._inboxes.discard(inbox)

    def make_room(self) -> None:
        """Give up the largest answer of the largest tenant, if all inboxes hold too much.

        Answers being read are spared, unless the limit is exceeded by far.
        """
        if self.held <= self.total_bytes:
            self._look_beyond = self.total_bytes
        if self.held <= self._look_beyond:
            return
        left = [each for each in self._inboxes if not each.awaited]
        if sum(each.behind for each in left) > self.total_bytes:
            found = left
        elif sum(each.behind for each in self._inboxes) > _MOST * self.total_bytes:
            found = list(self._inboxes)
        else:
            self._look_beyond = self.held + self.total_bytes // _LOOKS
            return
        self._look_beyond = self.total_bytes
        behind: Counter[str] = Counter()
        for each in found:
            behind[each.tenant] += each.behind
        most = max(behind, key=behind.__getitem__)
        of_tenant = [each for each in found if each.tenant == most]
        max(of_tenant, key=lambda inbox: inbox.behind).overflow()


class Inbox(Generic[_Leg]):
    """Events of one attempt, in order of arrival."""

    def __init__(self, backlog: Backlog, overflow: Callable[[], None], tenant: str = "") -> None:
        """``overflow`` is called if too much waits; it should ``clear``."""
        self.tenant = tenant
        self.held = 0
        """Bytes of waiting events."""
        self.awaited = False
        """Whether the reader waits, or is about to continue reading."""
        self.overflow = overflow
        self._backlog = backlog
        self._items: deque[tuple[int, _Leg, LegEvent]] = deque()
        self._largest = 0
        """Bytes of the largest waiting event; 0 if unknown."""
        self._had_too_much = False
        """Whether the last ``judge`` found too many waiting outputs, and some still wait."""

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def behind(self) -> int:
        """Return the waiting bytes without the largest event, which may have any size."""
        return self.held - self._largest

    def put(self, leg: _Leg, event: LegEvent) -> None:
        size, backlog = weigh(event), self._backlog
        if not self._items:
            backlog.enter(self)  # type: ignore[arg-type]  # of whatever legs
        self._items.append((size, leg, event))
        self._largest = max(self._largest, size)
        self.held += size
        backlog.held += size
        backlog.make_room()

    def judge(self, *, stood_still: bool) -> None:
        """Call ``overflow`` if too much has waited since the last call.

        Periods in which the loop ``stood_still`` do not count.
        """
        too_much = not self.awaited and self.behind > self._backlog.stream_bytes
        if too_much and self._had_too_much and not stood_still:
            self.overflow()
        else:
            self._had_too_much = too_much

    def pop(self) -> tuple[_Leg, LegEvent] | None:
        if not self._items:
            return None
        size, leg, event = self._items.popleft()
        self.held -= size
        self._backlog.held -= size
        if size == self._largest:
            self._largest = 0
        if not self._items:
            self._emptied()
        return leg, event

    def clear(self) -> None:
        self._backlog.held -= self.held
        self.held = self._largest = 0
        self._items.clear()
        self._emptied()

    def _emptied(self) -> None:
        self._had_too_much = False
        self._backlog.leave(self)  # type: ignore[arg-type]


TAKEN_AFTER = 1.0
"""Seconds without a refusal after which workers count as having taken the request."""
BAD_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})


@dataclass(slots=True)
class Explained:
    """Placement and times of one attempt, in seconds."""

    request: str
    attempt: int
    num_prompt: int
    placement: Placement
    tenant: str = ""
    ttft: float | None = None
    second: float | None = None


class LegState(Enum):
    """State of a leg, as far as known here."""

    SENT = auto()
    ACCEPTED = auto()
    ENDED = auto()


class Leg:
    """Part of an attempt on one worker; ``Sink`` of its events."""

    __slots__ = (
        "attempt",
        "came_at",
        "counts",
        "has_output",
        "is_prefill",
        "loads",
        "num_tokens",
        "record",
        "state",
        "streams",
        "whole_tokens",
        "worker",
    )

    def __init__(self, attempt: Attempt, worker: Worker, *, is_prefill: bool) -> None:
        self.attempt = attempt
        self.worker = worker
        self.is_prefill = is_prefill
        """Whether it produces KV for another leg."""
        self.loads = False
        """Whether it loads KV from another leg."""
        self.state = LegState.SENT
        self.counts = False
        """Whether it counts among its worker's legs."""
        self.has_output = False
        """Whether an output was read."""
        self.came_at: float | None = None
        """Time of the first output, by the loop's clock."""
        self.streams = False
        """Whether it counts among its worker's decoding legs."""
        self.num_tokens = 0
        """Prompt tokens counted on the worker until its first output."""
        self.whole_tokens = 0
        """Tokens of the same prompt, including cached ones."""
        self.record: LegRecord | None = None

    def receive(self, event: LegEvent) -> None:
        record = self.record
        if record is not None and record.first is None:
            now = time.monotonic()
            if type(event) is Accepted:
                record.accepted = now
            elif isinstance(event, EngineCoreOutput | PooledOutput):
                record.first = now
        self.attempt.receive(self, event)

    def timed(self, times: LegTimes) -> None:
        if self.record is not None:
            self.record.times, self.record.received_at = times, time.monotonic()

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
        """Note the first output: the leg decodes, unless its KV is sent on."""
        if self.is_prefill:
            self.let_go()
            return
        self.counted_off()
        if self.counts:
            self.streams = True
            self.worker.num_streams += 1

    def counted_off(self) -> None:
        """Stop counting the prompt as waiting."""
        if self.num_tokens:
            self.worker.leg_prompts -= 1
        self._count(-self.num_tokens, -self.whole_tokens)
        self.num_tokens = self.whole_tokens = 0

    def counted_on(self, num_prompt: int, num_cached: int) -> None:
        """Count the prompt as waiting on its worker."""
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
    """Attempt: ``start``, ``pop`` or ``wait``, and always ``end``."""

    def __init__(
        self,
        number: int,
        placement: Placement,
        loop: asyncio.AbstractEventLoop,
        *,
        kind: AttemptKind = AttemptKind.FIRST,
        backlog: Backlog | None = None,
        tenant: str = "",
        num_open: int = 1,
        all_ended: Callable[[], None] = lambda: None,
        overflow: Callable[[], None] = lambda: None,
    ) -> None:
        """``all_ended`` is called when the workers have ended all ``num_open`` choices.

        ``overflow`` is called if too much is unread.
        """
        self.number = number
        self.placement = placement
        self.kind = kind
        self.legs: list[Leg] = []
        self.started_at = loop.time()
        self.received_at = self.started_at
        """Time of the last event, read or not."""
        self.decoding = False
        """Whether the last worker has sent an output: a hand-off has ended."""
        self._loop = loop
        self._inbox: Inbox[Leg] = Inbox(backlog or Backlog(), overflow, tenant)
        self._open = num_open
        self._ended: set[int] = set()
        self._all_ended = all_ended
        self.explained: Explained | None = None
        """Forecast of the attempt, set when it is sent."""
        self.given_up: AttemptFailure | None = None
        """Failure by a deadline of the attempt."""
        self._waiter: asyncio.Future[None] | None = None
        self.record: AttemptRecord | None = None
        self.watch: Watch | None = None
        """Ids with which workers report the times of a recorded request."""

    def start(
        self,
        legs: list[tuple[Worker, EngineCoreRequest]],
        hits: Mapping[Incarnation, int] | None = None,
    ) -> AttemptFailure | None:
        """Send all legs; return the failure if a worker's link is down.

        ``hits``: cached tokens per worker.
        """
        for worker, request in legs:
            leg = Leg(self, worker, is_prefill=len(legs) == 2 and not self.legs)
            self.legs.append(leg)
            if self.record is not None:
                leg.record = LegRecord(str(worker.role), worker.name, time.monotonic())
                self.record.legs.append(leg.record)
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
        """Note a choice's end. After the last, the workers count as free."""
        if choice in self._ended:
            return
        self._ended.add(choice)
        if len(self._ended) == self._open:
            for leg in self.legs:
                leg.let_go()
            self._all_ended()

    def end_choices(self, request: str, choices: tuple[int, ...]) -> None:
        """End choices whose reader has found their end: decode workers drop them.

        Prefill workers hand all choices over.
        """
        for choice in choices:
            self._choice_ended(choice)
        for leg in self.legs:
            worker, goes_on = leg.worker, leg.state is not LegState.ENDED
            if goes_on and not leg.is_prefill and worker.card.ends_choices:
                worker.connection.end_choices(request, self.number, choices)

    def give_up(self, failure: AttemptFailure) -> None:
        """End the attempt with a failure."""
        self.given_up = failure
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def pop(self) -> tuple[Leg, LegEvent] | None:
        return self._inbox.pop()

    async def wait(self, recording: Recording | None = None) -> None:
        """Return after an event or ``wake``."""
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
                    else:  # no call per token
                        recording.wait_seconds += now - since

    def judge(self, leg: Leg, event: Accepted | Refused | Failed) -> AttemptFailure | None:
        """Return the attempt's failure by an event without tokens, or None."""
        if isinstance(event, Accepted):
            if leg.state is LegState.SENT:
                leg.state = LegState.ACCEPTED
            return None
        leg.state = LegState.ENDED
        if leg.is_prefill and self.decoding:
            return None  # D has the KV
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
        """Return whether its workers have had time to refuse it."""
        return now - self.started_at > TAKEN_AFTER

    def note_output(self, leg: Leg) -> None:
        """Note that an output was read."""
        if leg.has_output:
            return
        leg.has_output = True
        leg.counted_off()
        if not leg.is_prefill:
            self.decoding = True
        if leg.state is LegState.SENT:
            leg.state = LegState.ACCEPTED

    def failure(
        self, leg: Leg, cause: FailCause, message: str, *, own: bool = False
    ) -> AttemptFailure:
        """Return the attempt's failure by ``leg``.

        ``own``: the link is not at fault.
        """
        return AttemptFailure(
            worker=leg.worker.incarnation,
            worker_name=leg.worker.name,
            pair=None if own else self.placement.pair,
            message=message,
            cause=cause,
        )

    def overslept(self, seconds: float) -> None:
        """Do not count a stall of this router as silence of the workers."""
        now = self._loop.time()
        self.started_at += min(seconds, now - self.started_at)
        self.received_at += min(seconds, now - self.received_at)
        for leg in self.legs:
            if leg.came_at is not None:
                leg.came_at += min(seconds, now - leg.came_at)

    def judge_reader(self, *, stood_still: bool) -> None:
        self._inbox.judge(stood_still=stood_still)

    def overdue(self, now: float, *, accept: float, progress: float) -> AttemptFailure | None:
        """Return the failure if a worker did not accept or send a token in time."""
        if self._inbox:
            return None
        if now - self.started_at > accept:
            for leg in self.legs:
                if leg.state is LegState.SENT and not (leg.is_prefill and self.decoding):
                    # The worker's fault, not its link's.
                    return self.failure(
                        leg, FailCause.TIMEOUT, f"not accepted in {accept:g} s", own=True
                    )
        if self._queued:
            self.received_at = now  # the time to the first token begins after the queue
        elif now - self.received_at > progress:
            message = f"no token in {progress:g} s"
            return self.failure(self.legs[-1], FailCause.TIMEOUT, message, own=self.decoding)
        return None

    @property
    def _queued(self) -> bool:
        """Return whether no leg has sent an output and a worker reports a queue."""
        if any(leg.has_output for leg in self.legs):
            return False
        loads = [leg.worker.load for leg in self.legs]
        return any(load is not None and load.num_waiting for load in loads)

    def end(self, request: str, *, finished: bool) -> None:
        """Receive no more events, and send CANCEL to legs that may hold something.

        ``finished``: workers have ended all choices.
        """
        for leg in self.legs:
            let_go = leg.state is LegState.ENDED or (finished and self.decoding and leg.has_output)
            leg.let_go()
            leg.worker.connection.release(request, self.number, cancel=not let_go)
        self.legs = []
        self._inbox.clear()
