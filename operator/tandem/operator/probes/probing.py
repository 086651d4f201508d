"""Canaries and reads of links outside the reconciliation, in threads.

A changed answer wakes the service. Results are in memory only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock

import msgspec

from tandem.operator.api.status import Links, Reason
from tandem.operator.decide.words import Verdict
from tandem.operator.probes.canary import Question, ask
from tandem.operator.probes.fleet import read_links, steadied

logger = logging.getLogger(__name__)

Key = tuple[str, str]
_FIRST_RETRY, _LAST_RETRY = 1.0, 15.0
_QUEUED = "; the last question waited in the queue: "
_RECOUNT = 3.0
"""Seconds after which links of other pods are counted again."""


@dataclass(slots=True)
class Asked:
    """Set of revisions, and its last verdict."""

    verdict: Verdict | None = None
    busy: bool = False
    due: float = 0.0
    """Time of the next canary, on the monotonic clock."""
    at: float = 0.0
    """Time of the last canary."""
    retry: float = _FIRST_RETRY


@dataclass(slots=True)
class Known:
    """Known links and verdicts of a service."""

    links: Links | None = None
    asked: dict[str, Asked] = field(default_factory=dict)
    """Sets by the name of the revisions."""

    def verdict(self, targets: str) -> Verdict | None:
        found = self.asked.get(targets)
        return None if found is None else found.verdict

    def servable(self) -> frozenset[str]:
        """Return the names of revisions whose last canary succeeded."""
        asked = self.asked.items()
        return frozenset(name for name, each in asked if each.verdict and each.verdict.ok)


class Probes:
    """Verdicts and links by service. Thread-safe."""

    def __init__(self, interval: float, wake: Callable[[Key], None], workers: int = 4) -> None:
        self._interval = interval
        self._wake = wake
        self._known: dict[Key, Known] = {}
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="canary")

    def known(self, key: Key) -> Known:
        with self._lock:
            return self._known.setdefault(key, Known())

    def as_of_now(self, key: Key) -> Known:
        """Return a copy without later answers, so that a pass decides and reports the same."""
        known = self.known(key)
        with self._lock:
            asked = {name: replace(each) for name, each in known.asked.items()}
            return Known(known.links, asked)

    def forget(self, key: Key) -> None:
        with self._lock:
            self._known.pop(key, None)

    def poll(
        self, key: Key, questions: Iterable[Question], *, about: Set[str], links: int
    ) -> float | None:
        """Send due questions; return the seconds until the next one, or None.

        Verdicts on revisions outside ``about`` are dropped. ``links`` pairs of workers are
        expected; without a pair the last count is dropped.
        """
        known = self.known(key)
        with self._lock:
            if links == 0 and known.links is not None:
                known.links = Links(healthy=0, total=0)
            for name in known.asked.keys() - about:
                del known.asked[name]
        waits = [self._poll(key, known, question, links) for question in questions]
        return min(waits, default=None)

    def _poll(self, key: Key, known: Known, question: Question, links: int) -> float:
        now = time.monotonic()
        with self._lock:
            asked = known.asked.setdefault(question.targets, Asked())
            recount = known.links is not None and known.links.total != links
            due = min(asked.due, asked.at + _RECOUNT) if recount else asked.due
            if asked.busy or now < due:
                return max(0.5, due - now)
            asked.busy, asked.at = True, now
        self._pool.submit(self._ask, key, known, asked, question, links)
        return self._interval

    def _ask(self, key: Key, known: Known, asked: Asked, question: Question, links: int) -> None:
        verdict, seen = _unanswered(question), None
        try:
            verdict = ask(question, time.time())
            seen = read_links(question.base_url, links, question.token)
        except Exception:  # else it would count as busy for ever
            logger.exception("%s/%s: the canary has ended unexpectedly", *key)
        with self._lock:
            seen = None if seen is None else steadied(seen, known.links)
            if verdict.reason is Reason.CANARY_QUEUED and asked.verdict is not None:
                verdict = queued(asked.verdict, verdict)
            changed = asked.verdict is None or asked.verdict.reason is not verdict.reason
            changed = changed or seen != known.links
            asked.verdict, known.links, asked.busy = verdict, seen or known.links, False
            asked.retry = _FIRST_RETRY if verdict.ok else min(2 * asked.retry, _LAST_RETRY)
            all_up = known.links is None or known.links.healthy >= known.links.total
            rest = self._interval if all_up else min(self._interval, _LAST_RETRY)
            asked.due = time.monotonic() + (rest if verdict.ok else asked.retry)
        if changed or not verdict.ok:
            self._wake(key)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def queued(before: Verdict, now: Verdict) -> Verdict:
    """Return the previous verdict: the last question got no turn."""
    text = before.message.partition(_QUEUED)[0]
    return msgspec.structs.replace(before, message=f"{text}{_QUEUED}{now.message}")


def _unanswered(question: Question) -> Verdict:
    """Return the verdict before any answer."""
    text = "the canary failed unexpectedly; see the operator's log"
    return Verdict(
        ok=False,
        reason=Reason.CANARY_FAILED,
        message=text,
        targets=question.targets,
        at=time.time(),
    )
