"""The work queue: keys, each at most once, never two workers on one key, failures again later.

kopf does not retry ``on.event`` handlers, so they only add keys here; so does the periodic list.
Plain threads, because the Kubernetes client blocks. Called by ``watch`` and ``probing``.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from tandem.operator.cluster import ClusterError
from tandem.operator.look import Key, Trigger
from tandem.operator.metrics import OperatorMetrics

logger = logging.getLogger(__name__)

FIRST_BACKOFF, LAST_BACKOFF = 1.0, 60.0
_DOUBLINGS = 6
"""Doublings after which the last backoff is reached; a float would not hold the thousandth."""
LONGEST_REST = 2.0
"""Longest rest. A service rests between two looks for as long as a look takes, up to this. If every
call is slow, looks from a storm of events leave half of the time to watches and repairs."""


class WorkQueue:
    """Queue of keys: deduplicates, serialises per key, backs off. Thread-safe."""

    def __init__(
        self, metrics: OperatorMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()
        self._asked: dict[Key, dict[Trigger, float]] = {}
        """Reasons for a look at a key, each with its latest time."""
        self._taken_for: dict[Key, tuple[Trigger, ...]] = {}
        self._failures: dict[Key, int] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def because(self, why: Trigger) -> Callable[..., None]:
        """Return ``add`` for a caller with one reason."""
        return partial(self.add, why=why)

    def why(self, key: Key) -> tuple[Trigger, ...]:
        """Return the reasons of the look that runs for ``key``."""
        with self._changed:
            return self._taken_for.get(key, ())

    def add(self, key: Key, after: float = 0.0, *, why: Trigger) -> None:
        """Look at ``key`` within ``after`` seconds; an earlier date wins."""
        with self._changed:
            due = self._clock() + after
            asked = self._asked.setdefault(key, {})
            asked[why] = min(due, asked.get(why, due))
            if due >= self._due.get(key, float("inf")):
                return
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._metrics.depth.set(len(self._due))
            self._changed.notify()

    def take(self, timeout: float | None = None) -> Key | None:
        """Return the next due key that no worker has; None when stopped or timed out."""
        limit = None if timeout is None else self._clock() + timeout
        with self._changed:
            while not self._stopped:
                key, wait = self._next()
                if key is not None:
                    del self._due[key]
                    self._busy.add(key)
                    self._taken_for[key] = self._come(key)
                    self._metrics.depth.set(len(self._due))
                    return key
                if limit is not None:
                    wait = min(wait, limit - self._clock())
                    if wait <= 0:
                        return None
                self._changed.wait(min(wait, 60.0))
        return None

    def _next(self) -> tuple[Key | None, float]:
        """Return a key that may be taken, or the seconds to wait for one."""
        now, parked, found = self._clock(), [], None
        while self._heap and found is None:
            due, key = self._heap[0]
            if self._due.get(key) != due:  # an earlier date replaced this one
                heapq.heappop(self._heap)
            elif due > now:
                break
            elif key in self._busy:
                parked.append(heapq.heappop(self._heap))
            else:
                heapq.heappop(self._heap)
                found = key
        for entry in parked:
            heapq.heappush(self._heap, entry)
        later = [due for due, key in self._heap if due > now]
        return found, max(0.01, min(later) - now) if later else 60.0

    def _come(self, key: Key) -> tuple[Trigger, ...]:
        """Return the due reasons for looking at ``key``; later ones are served by the same look."""
        now = self._clock()
        return tuple(why for why, due in self._asked.pop(key, {}).items() if due <= now)

    def done(self, key: Key, *, again: float | None = None, rest: float = 0.0) -> None:
        """Record that ``key`` was looked at; look again later if requested, and not before ``rest``
        seconds are over if another look was requested meanwhile."""
        with self._changed:
            self._busy.discard(key)
            self._taken_for.pop(key, None)
            self._failures.pop(key, None)
            if rest > 0 and key in self._due:
                self._due[key] = max(self._due[key], self._clock() + rest)
                heapq.heappush(self._heap, (self._due[key], key))
            self._changed.notify()
        if again is not None:
            self.add(key, again, why=Trigger.AGAIN)

    def failed(self, key: Key) -> float:
        """Record that the look failed; return the seconds until the next one."""
        with self._changed:
            self._busy.discard(key)
            self._taken_for.pop(key, None)
            count = self._failures.get(key, 0)
            self._failures[key] = count + 1
            self._changed.notify()
        wait = min(FIRST_BACKOFF * 2.0 ** min(count, _DOUBLINGS), LAST_BACKOFF)
        self.add(key, wait, why=Trigger.RETRY)
        return wait

    def stop(self) -> None:
        """Stop: wake all waiting threads; no key is taken any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def work(
    queue: WorkQueue, reconcile: Callable[[Key], float | None], metrics: OperatorMetrics
) -> None:
    """Take keys and look at them until the queue stops; a thread's whole life."""
    while (key := queue.take()) is not None:
        started = time.perf_counter()
        try:
            again = reconcile(key)
        except ClusterError as error:
            metrics.errors.labels(str(error.status)).inc()
            logger.warning("%s/%s: %s; again in %.0f s", *key, error, queue.failed(key))
        except Exception:  # one broken service must not stop the others
            metrics.errors.labels("bug").inc()
            logger.exception("%s/%s: unexpected; again in %.0f s", *key, queue.failed(key))
        else:
            queue.done(key, again=again, rest=min(time.perf_counter() - started, LONGEST_REST))
            metrics.last_success.set_to_current_time()
        metrics.duration.observe(time.perf_counter() - started)
