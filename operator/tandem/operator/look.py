"""The record of one reconcile pass of a service: its reasons, phases and calls.

The caller makes a ``LookRecord`` current in its thread; other code enters phases.
``reconcile.traced`` makes spans of records.
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
"""Context of work for a service outside passes, given service and reasons."""
MAX_CALLS = 256
"""Maximum recorded calls of a pass; further ones are counted."""
READS = frozenset({"GET"})


class Trigger(StrEnum):
    """Reasons for a pass."""

    SERVICE = "service changed"
    CHILD = "child changed"
    RESYNC = "resync"
    CANARY = "canary answered"
    KEYS = "keys read"
    REFUSALS = "refusals read"
    REACH = "router silent or back"
    AGAIN = "due again"
    RETRY = "retry"


@dataclass(slots=True)
class Phase:
    """Phase of a pass, in seconds of the monotonic clock."""

    name: str
    begin: float
    end: float | None = None
    """None while it lasts."""
    failure: str | None = None
    """Error in the phase, even if the pass continued."""


@dataclass(slots=True, frozen=True)
class ApiCall:
    """One call to the API server."""

    method: str
    path: str
    name: str
    """Name of the sent object if the path has none."""
    content_type: str
    dry_run: bool
    begin: float
    """Seconds of the monotonic clock, as ``end``."""
    end: float
    status: int
    """HTTP status; 0 without an answer."""
    phase: Phase | None

    @property
    def writes(self) -> bool:
        """Return whether the call was meant to change objects."""
        return self.method not in READS and not self.dry_run


@dataclass(slots=True, eq=False)
class LookRecord:
    """Record of one reconcile pass, or of work outside passes."""

    name: str
    key: Key
    why: tuple[str, ...]
    began: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.time)
    """Time of ``began`` on the wall clock."""
    generation: int | None = None
    """Generation of the service's spec; None if unknown."""
    phases: list[Phase] = field(default_factory=list)
    calls: list[ApiCall] = field(default_factory=list)
    dropped: int = 0
    """Calls that were not recorded."""
    num_writes: int = 0
    num_reads: int = 0
    ended: float | None = None
    again: float | None = None
    """Seconds until the next pass that this one requests."""
    failure: str | None = None
    failure_type: str | None = None

    @property
    def is_notable(self) -> bool:
        """Return whether the pass tried to write, or failed. Other passes are not traced."""
        return self.num_writes > 0 or self.failure is not None

    def enter(self, name: str) -> None:
        """Begin the next phase, and end the last one."""
        now = time.monotonic()
        if self.phases:
            self.phases[-1].end = now
        self.phases.append(Phase(name, now))

    def end(self, error: BaseException | None = None) -> None:
        """End the record, as failed with ``error``."""
        self.ended = time.monotonic()
        if self.phases:
            self.phases[-1].end = self.ended
        if error is None:
            return
        self.failure, self.failure_type = str(error), type(error).__name__
        if self.phases and not any(phase.failure == self.failure for phase in self.phases):
            self.phases[-1].failure = self.failure


def unrecorded(_key: Key, _why: Iterable[str]) -> AbstractContextManager[None]:
    """Return a block without a record."""
    return nullcontext()


_CURRENT: ContextVar[LookRecord | None] = ContextVar("look", default=None)


@contextmanager
def recording(record: LookRecord) -> Iterator[None]:
    """Make ``record`` the thread's current one within the block, and end it."""
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
    """Begin the next phase of the current pass."""
    record = _CURRENT.get()
    if record is not None:
        record.enter(phase)


def met(error: BaseException) -> None:
    """Record an error in the current phase, which continues."""
    record = _CURRENT.get()
    if record is not None and record.phases:
        record.phases[-1].failure = str(error)


def saw(generation: int) -> None:
    """Record the generation of the spec of the current pass."""
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
    """Record a call to the API server that has ended.

    ``name`` is that of a new object; ``begin`` is in seconds of the monotonic clock.
    """
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
