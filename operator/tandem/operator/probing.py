"""Asks canaries and reads links beside the reconciliation, which must not wait for them.

One question a service at a time, in threads of its own; an answer that changes something wakes the
service up. Results live in memory only: another leader asks again. Called by ``reconcile``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from tandem.operator.api.status import Links
from tandem.operator.canary import Question, Verdict, ask
from tandem.operator.fleet import read_links

Key = tuple[str, str]
_FIRST_RETRY, _LAST_RETRY = 1.0, 15.0


@dataclass(slots=True)
class Known:
    """What is known of a service."""

    verdict: Verdict | None = None
    links: Links | None = None
    busy: bool = False
    due: float = 0.0
    """When to ask again, by the monotonic clock."""
    retry: float = _FIRST_RETRY


class Probes:
    """Verdicts and links by service. Thread-safe."""

    def __init__(self, interval: float, wake: Callable[[Key], None], workers: int = 4) -> None:
        self._interval = interval
        self._wake = wake
        self._known: dict[Key, Known] = {}
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="canary")

    def known(self, key: Key) -> Known:
        """What is known now."""
        with self._lock:
            return self._known.setdefault(key, Known())

    def forget(self, key: Key) -> None:
        """The service is gone."""
        with self._lock:
            self._known.pop(key, None)

    def poll(self, key: Key, question: Question, links: int) -> float:
        """Ask if it is time, or if other revisions are meant than last time; seconds until the
        next question. ``links`` pairs of workers are expected."""
        known, now = self.known(key), time.monotonic()
        with self._lock:
            changed = known.verdict is None or known.verdict.targets != question.targets
            if changed and known.verdict is not None:
                known.verdict, known.due, known.retry = None, 0.0, _FIRST_RETRY
            if known.busy or now < known.due:
                return max(0.5, known.due - now)
            known.busy = True
        self._pool.submit(self._ask, key, known, question, links)
        return self._interval

    def _ask(self, key: Key, known: Known, question: Question, links: int) -> None:
        verdict = ask(question, time.time())
        seen = read_links(question.base_url, links)
        with self._lock:
            changed = known.verdict is None or known.verdict.reason is not verdict.reason
            changed = changed or seen != known.links
            known.verdict, known.links, known.busy = verdict, seen or known.links, False
            known.retry = _FIRST_RETRY if verdict.ok else min(2 * known.retry, _LAST_RETRY)
            known.due = time.monotonic() + (self._interval if verdict.ok else known.retry)
        if changed or not verdict.ok:
            self._wake(key)

    def close(self) -> None:
        """Ask nobody any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
