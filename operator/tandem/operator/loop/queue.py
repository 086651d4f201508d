"""The work queue: each key at most once, one worker per key, retries after failures.

Threads, because the Kubernetes client blocks.
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
"""Maximum doublings of the backoff."""
LONGEST_REST = 2.0
"""Maximum seconds of rest after a pass, which otherwise equals its duration.

So watches and repairs get half of the time.
"""


class WorkQueue:
    """Queue of keys. Thread-safe."""

    def __init__(
        self, metrics: OperatorMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: set[Key] = set()
        self._asked: dict[Key, dict[Trigger, float]] = {}
        """Reasons for a pass by key, with their latest times."""
        self._taken_for: dict[Key, tuple[Trigger, ...]] = {}
        self._failures: dict[Key, int] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def because(self, why: Trigger) -> Callable[..., None]:
        """Return ``add`` for a caller with one reason."""
        return partial(self.add, why=why)

    def why(self, key: Key) -> tuple[Trigger, ...]:
        """Return the reasons of the current pass for ``key``."""
        with self._changed:
            return self._taken_for.get(key, ())

    def add(self, key: Key, after: float = 0.0, *, why: Trigger) -> None:
        """Reconcile ``key`` within ``after`` seconds; an earlier date wins."""
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
        """Return the next due key without a worker; None when stopped or timed out."""
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
        """Return a key, or the seconds to wait for one."""
        now, parked, found = self._clock(), [], None
        while self._heap and found is None:
            due, key = self._heap[0]
            if self._due.get(key) != due:  # replaced by an earlier date
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
        """Return the due reasons for looking at ``key``; later ones are included."""
        now = self._clock()
        return tuple(why for why, due in self._asked.pop(key, {}).items() if due <= now)

    def done(self, key: Key, *, again: float | None = None, rest: float = 0.0) -> None:
        """Record a pass of ``key``; reconcile again after ``again`` seconds.

        A pass that was requested meanwhile waits for ``rest`` seconds.
        """
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
        """Record a failed pass; return the seconds until the next one."""
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
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def work(
    queue: WorkQueue, reconcile: Callable[[Key], float | None], metrics: OperatorMetrics
) -> None:
    """Reconcile keys until the queue stops, as a thread's main function."""
    while (key := queue.take()) is not None:
        started = time.perf_counter()
        try:
            again = reconcile(key)
        except ClusterError as error:
            metrics.errors.labels(str(error.status)).inc()
            logger.warning("%s/%s: %s; again in %.0f s", *key, error, queue.failed(key))
        except Exception:  # one broken service must not stop others
            metrics.errors.labels("bug").inc()
            logger.exception("%s/%s: unexpected; again in %.0f s", *key, queue.failed(key))
        else:
            queue.done(key, again=again, rest=min(time.perf_counter() - started, LONGEST_REST))
            metrics.last_success.set_to_current_time()
        metrics.duration.observe(time.perf_counter() - started)
