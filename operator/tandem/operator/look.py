"""The record of one look at a service: why it was taken, where its time went, what it asked.

Whoever takes a look opens a ``LookRecord`` and makes it the current one of its thread; whoever does
a part of the work says so. Without one, that is a look at a variable. Spans are made from records
by ``reconcile.traced``; nothing here knows of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

Key = tuple[str, str]
Beside = Callable[[Key, Iterable[str]], AbstractContextManager[None]]
"""A block of work for a service beside looks: whose it is, and why."""
MAX_CALLS = 256
"""Calls of one look that are noted one by one; further ones are counted."""
READS = frozenset({"GET"})


class Why(StrEnum):
    """What a look is taken for."""

    SERVICE = "service changed"
    CHILD = "child changed"
    RESYNC = "resync"
    CANARY = "canary answered"
    KEYS = "keys read"
    REFUSALS = "refusals told"
    REACH = "router silent or back"
    AGAIN = "due again"
    RETRY = "retry"


@dataclass(slots=True)
class Phase:
    """One stretch of a look, on the process's monotonic clock."""

    name: str
    begin: float
    end: float | None = None
    """None while it lasts."""
    failure: str | None = None
    """An error that it met, whether or not the look went on."""


@dataclass(slots=True, frozen=True)
class ApiCall:
    """One call to the API server, as it was sent."""

    method: str
    path: str
    name: str
    """Of the object that it sends, where the path names none; empty else."""
    content_type: str
    dry_run: bool
    begin: float
    """Seconds on the process's monotonic clock, as ``end``."""
    end: float
    status: int
    """HTTP status; 0 where no answer came."""
    phase: Phase | None
    """Of the look, in which it was sent."""

    @property
    def writes(self) -> bool:
        """Whether it was to change what the API server holds."""
        return self.method not in READS and not self.dry_run


@dataclass(slots=True, eq=False)
class LookRecord:
    """One look, or one piece of work beside looks."""

    name: str
    key: Key
    why: tuple[str, ...]
    began: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.time)
    """Of ``began``, on the wall clock."""
    generation: int | None = None
    """Of the service's spec; None where the look did not come so far."""
    phases: list[Phase] = field(default_factory=list)
    calls: list[ApiCall] = field(default_factory=list)
    dropped: int = 0
    """Calls that found no room."""
    num_writes: int = 0
    num_reads: int = 0
    ended: float | None = None
    again: float | None = None
    """Seconds until the next look that it asked for."""
    failure: str | None = None
    failure_type: str | None = None

    @property
    def is_notable(self) -> bool:
        """Whether it tried to write, or failed: what found nothing to do is nobody's news."""
        return self.num_writes > 0 or self.failure is not None

    def enter(self, name: str) -> None:
        """The next phase begins, and the last one ends."""
        now = time.monotonic()
        if self.phases:
            self.phases[-1].end = now
        self.phases.append(Phase(name, now))

    def end(self, error: BaseException | None = None) -> None:
        """It is over; with ``error`` it failed."""
        self.ended = time.monotonic()
        if self.phases:
            self.phases[-1].end = self.ended
        if error is None:
            return
        self.failure, self.failure_type = str(error), type(error).__name__
        if self.phases and not any(phase.failure == self.failure for phase in self.phases):
            self.phases[-1].failure = self.failure


def unrecorded(_key: Key, _why: Iterable[str]) -> AbstractContextManager[None]:
    """A block of which no record is kept."""
    return nullcontext()


_CURRENT: ContextVar[LookRecord | None] = ContextVar("look", default=None)


@contextmanager
def recording(record: LookRecord) -> Iterator[None]:
    """``record`` is the thread's current one within the block, and knows how this ended."""
    token = _CURRENT.set(record)
    try:
        yield
    except BaseException as error:
        record.end(error)
        raise
    else:
        record.end()
    finally:
        _CURRENT.reset(token)


def enter(phase: str) -> None:
    """The current look's next phase begins, where there is one that is recorded."""
    record = _CURRENT.get()
    if record is not None:
        record.enter(phase)


def met(error: BaseException) -> None:
    """The current look's phase met an error, and goes on."""
    record = _CURRENT.get()
    if record is not None and record.phases:
        record.phases[-1].failure = str(error)


def saw(generation: int) -> None:
    """Which generation of its service's spec the current look is about."""
    record = _CURRENT.get()
    if record is not None:
        record.generation = generation


def called(
    method: str,
    path: str,
    content_type: str,
    *,
    name: str,
    dry_run: bool,
    begin: float,
    status: int,
) -> None:
    """A call to the API server is over: ``name`` is that of an object which it was to make, and
    ``begin`` in seconds on the monotonic clock."""
    record = _CURRENT.get()
    if record is None:
        return
    phase = record.phases[-1] if record.phases else None
    call = ApiCall(
        method, path, name, content_type, dry_run, begin, time.monotonic(), status, phase
    )
    record.num_writes += call.writes
    record.num_reads += method in READS
    if len(record.calls) < MAX_CALLS:
        record.calls.append(call)
    else:
        record.dropped += 1
