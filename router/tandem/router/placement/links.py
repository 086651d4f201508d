"""Health of hand-off links and of workers, from how attempts ended. Pure: the caller has the clock.

A link is a (prefill, decode) pair of incarnations. Only what a link can be blamed for counts:
timeouts, a low rate, a wrong identity, a wrong digest. One of the last two is enough. Refusals,
cancels and lost workers never count: a lost worker is lost for all links at once. Wrong bytes are
kept after the loss of an end, which may return as the same process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation

Pair = tuple[Incarnation, Incarnation]

WRONG_BYTES = frozenset({FailCause.IDENTITY, FailCause.DIGEST})
TIMEOUTS = 3
"""Timeouts within ``WINDOW`` after which a link is unused for ``REST`` seconds."""
WINDOW = 60.0
REST = 30.0
MAX_QUARANTINED = 4096
"""Quarantined links that are kept; above it the oldest is dropped."""
FAULTS = 3
"""Internal errors within ``WINDOW`` that make a worker suspect for ``REST``."""


@dataclass(slots=True)
class _Record:
    failures: deque[float] = field(default_factory=lambda: deque(maxlen=TIMEOUTS))
    rests_until: float = 0.0


class LinkHealth:
    """Outcomes per pair: timeouts are forgotten with either incarnation, wrong bytes are not."""

    def __init__(self) -> None:
        self._records: dict[Pair, _Record] = {}
        self._quarantined: dict[Pair, FailCause] = {}

    def failed(self, pair: Pair, cause: FailCause, now: float) -> None:
        """Record a hand-off that ended with ``cause``. Causes that are not the link's fault are
        ignored."""
        if cause in WRONG_BYTES:
            self._quarantined[pair] = cause
            if len(self._quarantined) > MAX_QUARANTINED:
                del self._quarantined[next(iter(self._quarantined))]
        elif cause is FailCause.TIMEOUT:
            self._rest(self._records.setdefault(pair, _Record()), now)

    def slow(self, pair: Pair, now: float) -> None:
        """Record a hand-off below the rate that the link must reach."""
        self._rest(self._records.setdefault(pair, _Record()), now)

    def succeeded(self, pair: Pair) -> None:
        """Record a hand-off that succeeded: earlier timeouts no longer count."""
        self._records.pop(pair, None)

    def usable(self, pair: Pair, now: float) -> bool:
        """Return whether requests may use the link."""
        return pair not in self._quarantined and not self.rests(pair, now)

    def quarantined(self) -> dict[Pair, FailCause]:
        """Return the links that stay closed until one end is another process, lost ends
        included."""
        return dict(self._quarantined)

    def rests(self, pair: Pair, now: float) -> bool:
        """Return whether the link is unused for a while, after timeouts."""
        record = self._records.get(pair)
        return record is not None and record.rests_until > now

    def forget(self, worker: Incarnation) -> None:
        """Drop the timeouts of a worker's links after it is lost."""
        for pair in [pair for pair in self._records if worker in pair]:
            del self._records[pair]

    def _rest(self, record: _Record, now: float) -> None:
        record.failures.append(now)
        if len(record.failures) == TIMEOUTS and now - record.failures[0] <= WINDOW:
            record.rests_until = now + REST
            record.failures.clear()


class WorkerHealth:
    """Internal errors of workers that are still up."""

    def __init__(self) -> None:
        self._faults: dict[Incarnation, deque[float]] = {}

    def fault(self, worker: Incarnation, now: float) -> None:
        """Record an attempt that failed by the worker's own fault."""
        self._faults.setdefault(worker, deque(maxlen=FAULTS)).append(now)

    def suspect(self, worker: Incarnation, now: float) -> bool:
        """Return whether the worker failed so often lately that it is the last choice."""
        faults = self._faults.get(worker)
        return (
            faults is not None
            and len(faults) == FAULTS
            and faults[-1] - faults[0] <= WINDOW
            and now - faults[-1] <= REST
        )

    def forget(self, worker: Incarnation) -> None:
        """Drop a worker that is lost."""
        self._faults.pop(worker, None)
