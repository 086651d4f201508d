"""The record of one call to a server: where its time went, as the serving process saw it.

Who serves a call opens a ``Recording`` and makes it the current one of its task; whoever does a
part of the work adds a mark. Without one, a mark is a look at a variable.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Any

from tandem.protocol.timeline import LegTimes, Watch

MAX_MARKS = 128
"""Marks of one call; further ones are dropped and counted."""
MAX_ATTEMPTS = 32
MAX_GAPS = 8
"""The longest waits for a worker between tokens that are kept."""


@dataclass(slots=True)
class Mark:
    """One stretch of the serving process's own work or waiting."""

    name: str
    begin: float
    """Seconds on the process's monotonic clock."""
    end: float


@dataclass(slots=True)
class LegRecord:
    """One worker's part of an attempt."""

    role: str
    worker: str
    """Its name for people."""
    sent: float
    accepted: float | None = None
    """When its word that it took the request came."""
    first: float | None = None
    """When its first output came."""
    heard: float | None = None
    """When its notes came."""
    times: LegTimes | None = None


@dataclass(slots=True)
class AttemptRecord:
    """One dispatch of a request, to one worker or a pair."""

    number: int
    rule: str
    """Why it went this way."""
    rung: str
    begin: float
    legs: list[LegRecord] = field(default_factory=list)
    end: float | None = None
    failure: str | None = None
    failed_worker: str | None = None
    span: Any = None
    """Of the tracer, where there is one."""
    scene: object = None
    """What placement saw, for whoever asks why."""


@dataclass(slots=True, eq=False)
class Recording:
    """One call, from its head to the last byte of its answer."""

    request_id: str
    arrived: float
    started: float = field(default_factory=time.time)
    """Of ``arrived``, on the wall clock."""
    path: str = ""
    tenant: str = ""
    """Tenant that the call belongs to, once its key is known."""
    route: str = ""
    """The template that the path fits; none where nobody serves it, or nobody was let in."""
    traceparent: str = ""
    """Of the span that is the call's own; workers' spans belong under it."""
    marks: list[Mark] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    dropped: int = 0
    first_output: float | None = None
    num_outputs: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """A heap of (seconds, when it ended): the longest waits for workers after the first output."""
    least_gap: float = -1.0
    """A shorter one is not among them."""
    wait_seconds: float = 0.0
    """All of them."""
    write_seconds: float = 0.0
    """Writing to the client, its slowness included, after the first output."""
    num_prompt: int = 0
    num_tokens: int = 0
    status: int = 0
    ended: float | None = None
    span: Any = None
    """Of the tracer, where there is one."""
    asked: dict[str, float] | None = None
    """Numbers that the first request asks for, as its span tells them; only where there is one.
    Never its parameters themselves: lists and schemas of clients may be of any size."""
    num_cached: int = 0
    finishes: list[str] = field(default_factory=list)
    """How choices ended."""
    rows: tuple[int, bytes] | None = None
    """What lists show of where its time went, when it is over, and how many legs had told then."""

    def mark(self, name: str, begin: float, end: float) -> None:
        """Keep one stretch."""
        if len(self.marks) < MAX_MARKS:
            self.marks.append(Mark(name, begin, end))
        else:
            self.dropped += 1

    def attempt(self, record: AttemptRecord) -> bool:
        """A request is sent to its workers; whether its record is kept."""
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(record)
            return True
        self.dropped += 1
        return False

    def output(self, num_tokens: int) -> None:
        """Tokens came."""
        if self.first_output is None:
            self.first_output = time.monotonic()
        self.num_outputs += 1
        self.num_tokens += num_tokens

    def waited(self, since: float, now: float) -> None:
        """Nothing was there to be read of the workers."""
        if self.first_output is None:
            return
        gap = now - since
        self.wait_seconds += gap
        if gap > self.least_gap:
            if len(self.gaps) < MAX_GAPS:
                heappush(self.gaps, (gap, now))
            else:
                heapreplace(self.gaps, (gap, now))
            if len(self.gaps) == MAX_GAPS:
                self.least_gap = self.gaps[0][0]

    @property
    def watch(self) -> Watch:
        """What workers are told."""
        return Watch(self.request_id, self.traceparent)


_current: ContextVar[Recording | None] = ContextVar("tandem_recording", default=None)


def current() -> Recording | None:
    """Of the call that this task serves, if it is recorded."""
    return _current.get()


def begin(recording: Recording) -> None:
    """Make it the current one of this task, and of those that it starts."""
    _current.set(recording)


class _Marked:
    """A block. No generator: most calls are not recorded, and each pays for it."""

    __slots__ = ("_name", "_recording", "_started")

    def __init__(self, name: str) -> None:
        self._name = name
        self._recording = _current.get()
        self._started = 0.0

    def __enter__(self) -> None:
        if self._recording is not None:
            self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._recording is not None:
            self._recording.mark(self._name, self._started, time.monotonic())


def marked(name: str) -> _Marked:
    """``with`` it: the block is a part of the current call."""
    return _Marked(name)
