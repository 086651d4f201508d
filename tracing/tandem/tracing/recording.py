"""Record of one call to a server: the times that the serving process measured.

The code that serves a call makes a ``Recording`` current for its task. Other code adds marks to it.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Any

from tandem.protocol.timeline import LegTimes, Watch

MAX_MARKS = 128
"""Maximum marks of a call; further ones are counted only."""
MAX_ATTEMPTS = 32
MAX_GAPS = 8
"""Number of the longest waits that are kept."""


@dataclass(slots=True)
class Mark:
    """Interval of work or waiting, in the process's monotonic clock."""

    name: str
    begin: float
    end: float


@dataclass(slots=True)
class LegRecord:
    """One worker's part of an attempt."""

    role: str
    worker: str
    sent: float
    accepted: float | None = None
    """Arrival time of the worker's ``Accepted``."""
    first: float | None = None
    received_at: float | None = None
    """Arrival time of its notes."""
    times: LegTimes | None = None


@dataclass(slots=True)
class AttemptRecord:
    """Dispatch of a request to one worker or a pair."""

    number: int
    rule: str
    attempt_kind: str
    begin: float
    legs: list[LegRecord] = field(default_factory=list)
    end: float | None = None
    failure: str | None = None
    failed_worker: str | None = None
    span: Any = None
    scene: object = None
    """State that placement used, to explain its decision."""


@dataclass(slots=True, eq=False)
class Recording:
    """One call, from its head to the last byte of its answer."""

    request_id: str
    arrived: float
    started: float = field(default_factory=time.time)
    """Wall-clock time of ``arrived``."""
    path: str = ""
    tenant: str = ""
    """Tenant of the call, once its key is known."""
    route: str = ""
    """Route template of the path. Empty if no handler matches or access was denied."""
    traceparent: str = ""
    """Header of the call's own span."""
    marks: list[Mark] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    dropped: int = 0
    first_output: float | None = None
    num_outputs: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Heap of (seconds, end time): the longest waits for workers after the first output."""
    least_gap: float = -1.0
    """Waits that are not longer are not kept."""
    wait_seconds: float = 0.0
    """Total of all waits."""
    write_seconds: float = 0.0
    num_prompt: int = 0
    num_tokens: int = 0
    status: int = 0
    ended: float | None = None
    span: Any = None
    asked: dict[str, float] | None = None
    """Numeric parameters of the first request, for its span; None without a span."""
    num_cached: int = 0
    finishes: list[str] = field(default_factory=list)
    rows: tuple[int, bytes] | None = None
    """Legs with known times, and the encoded summary for lists. Set after the end."""

    def mark(self, name: str, begin: float, end: float) -> None:
        """Keep one interval, or count it as dropped."""
        if len(self.marks) < MAX_MARKS:
            self.marks.append(Mark(name, begin, end))
        else:
            self.dropped += 1

    def attempt(self, record: AttemptRecord) -> bool:
        """Add the record of a new attempt. Return whether it is kept."""
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(record)
            return True
        self.dropped += 1
        return False

    def output(self, num_tokens: int) -> None:
        """Count an output of ``num_tokens`` tokens."""
        if self.first_output is None:
            self.first_output = time.monotonic()
        self.num_outputs += 1
        self.num_tokens += num_tokens

    def waited(self, since: float, now: float) -> None:
        """Record a wait for workers from ``since`` to ``now``. Ignored before the first output."""
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
        return Watch(self.request_id, self.traceparent)


_current: ContextVar[Recording | None] = ContextVar("tandem_recording", default=None)


def current() -> Recording | None:
    """Return the recording of the call that this task serves, or None."""
    return _current.get()


def begin(recording: Recording) -> None:
    """Make ``recording`` current for this task and the tasks that it starts."""
    _current.set(recording)


class marked:  # used like a function
    """Context manager that marks its block in the current call."""

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
