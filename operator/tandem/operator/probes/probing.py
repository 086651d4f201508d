"""Canaries and reads of links outside the reconciliation, which must not wait for them.

While revisions change both the old and the new ones are checked, each by itself, in threads of its
own; an answer with a change wakes the service up. Results are in memory only: another leader asks
again. Called by ``reconcile``.
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
"""Seconds after which links are counted again when there are other pods than those counted."""


@dataclass(slots=True)
class Asked:
    """One set of revisions, and its last verdict."""

    verdict: Verdict | None = None
    busy: bool = False
    due: float = 0.0
    """Time of the next canary, by the monotonic clock."""
    at: float = 0.0
    """Time of the last canary."""
    retry: float = _FIRST_RETRY


@dataclass(slots=True)
class Known:
    """Known links and verdicts of a service."""

    links: Links | None = None
    asked: dict[str, Asked] = field(default_factory=dict)
    """Sets by the name of the revisions, as ``rollout`` names them."""

    def verdict(self, targets: str) -> Verdict | None:
        """Return the last verdict on these revisions."""
        found = self.asked.get(targets)
        return None if found is None else found.verdict

    def servable(self) -> frozenset[str]:
        """Return the names of the revisions whose last canary was right."""
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
        """Return the current links and verdicts."""
        with self._lock:
            return self._known.setdefault(key, Known())

    def as_of_now(self, key: Key) -> Known:
        """Return a copy of them without later answers. A look reports the values by which it
        decided, or a service would be Ready before its rollout remembers that it was ever
        servable."""
        known = self.known(key)
        with self._lock:
            asked = {name: replace(each) for name, each in known.asked.items()}
            return Known(known.links, asked)

    def forget(self, key: Key) -> None:
        """Forget a service that is gone."""
        with self._lock:
            self._known.pop(key, None)

    def poll(
        self, key: Key, questions: Iterable[Question], *, about: Set[str], links: int
    ) -> float | None:
        """Send the questions that are due; return the seconds until the next one, None without one.
        Verdicts on revisions that are not in ``about`` are dropped. ``links`` pairs of workers are
        expected. Without a pair, the last count is dropped, so that as many pods that come later
        are counted again."""
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
        except Exception:  # else it would count as busy, and nobody would be asked again
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
        """Stop all requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def queued(before: Verdict, now: Verdict) -> Verdict:
    """Return the verdict ``before``, which still holds: the last question got no turn."""
    said = before.message.partition(_QUEUED)[0]
    return msgspec.structs.replace(before, message=f"{said}{_QUEUED}{now.message}")


def _unanswered(question: Question) -> Verdict:
    """Return the verdict that counts until there is an answer."""
    text = "the canary failed unexpectedly; see the operator's log"
    return Verdict(
        ok=False,
        reason=Reason.CANARY_FAILED,
        message=text,
        targets=question.targets,
        at=time.time(),
    )
