"""Rate of KV over each of D's links, bytes that wait there, and slow hand-offs.

A link's pace is bytes over the seconds in which announced KV waited, without the prompt's
computation and D's wait for blocks. Placement reads it; after minutes without use it is unknown. A
hand-off is slow if it exceeds ``kv_slow_seconds`` and four times its time at the link's best rate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.kvtransfer.control.client import PeerBook
from tandem.kvtransfer.handoff.pull import Pull
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.protocol.ids import Incarnation, RequestKey

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Interval of measurements of the waiting bytes."""
SAMPLE_SECONDS = 0.5
"""Busy seconds that make one sample of a link's pace."""
IDLE_SECONDS = 180.0
"""Seconds after which the pace of an unused link is unknown."""
NEW_SHARE = 0.5
SLOW_FACTOR = 4.0
WARN_SECONDS = 10.0
"""Pause between two warnings about one link; the next counts those between."""


PHASES_OF_WAITING = ("reserve", "pack", "slot", "read", "unpack", "commit")
"""Blocks of D; P's slots and packing; receive slots of D; bytes; verification; P's answer."""


@dataclass(slots=True)
class _Link:
    best_read: float = 0.0
    """Bytes per second of the fastest single read."""
    throughput: float = 0.0
    busy: float = 0.0
    moved: int = 0
    used_at: float = 0.0
    """Time at which KV last came or waited."""
    warned_at: float = float("-inf")
    unsaid: int = 0


@dataclass(slots=True)
class _Open:
    final_at: float | None = None
    slow: bool = False


class Throughput:
    """Rates of links; ``look`` is called once a turn."""

    def __init__(
        self,
        metrics: HandoffMetrics,
        book: PeerBook,
        *,
        token_bytes: float,
        slow_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._book = book
        self._token_bytes = token_bytes
        self._slow_seconds = slow_seconds
        self._links: dict[Incarnation, _Link] = {}
        self._open: dict[RequestKey, _Open] = {}
        self._is_reported = True
        """Whether the last measurement reported the current state."""
        for phase in PHASES_OF_WAITING:  # all series from the start, for their rates
            metrics.slow.labels(phase)
        self._clock = clock
        self._looked_at = clock()

    def begin(self, key: RequestKey) -> None:
        self._open[key] = _Open()
        self._is_reported = False

    def final(self, key: RequestKey) -> None:
        """Record that a prompt is done: all of its KV is announced."""
        known = self._open.get(key)
        if known is not None and known.final_at is None:
            known.final_at = self._clock()

    def end(self, key: RequestKey) -> None:
        self._is_reported = self._open.pop(key, None) is None and self._is_reported

    def moved(self, peer: Incarnation, nbytes: int, seconds: float) -> None:
        link = self._links.setdefault(peer, _Link())
        link.moved, link.used_at = link.moved + nbytes, self._clock()
        link.best_read = max(link.best_read, nbytes / max(seconds, 1e-6))

    def forget(self, peer: Incarnation) -> None:
        self._links.pop(peer, None)

    def rest(self) -> float | None:
        """Return the seconds until the next look; None if nothing is open or unreported and no pace
        expires."""
        if self._open or not self._is_reported:
            return LOOK_SECONDS
        oldest = min(
            (each.used_at for each in self._links.values() if each.throughput), default=None
        )
        return None if oldest is None else max(LOOK_SECONDS, oldest + IDLE_SECONDS - self._clock())

    def look(self, pulls: Mapping[RequestKey, Pull]) -> list[Incarnation]:
        """Sum up what waits on each link, measure its pace, and find slow hand-offs. Return the
        peers whose pace has become unknown."""
        now = self._clock()
        since = now - self._looked_at
        if since < LOOK_SECONDS:
            return []
        self._looked_at = now
        waiting: dict[Incarnation, float] = dict.fromkeys(self._links, 0.0)
        comes: set[Incarnation] = set()
        for key, known in self._open.items():
            pull = pulls.get(key)
            if pull is None:
                continue
            announced = pull.waiting * self._token_bytes
            waiting[pull.producer] = waiting.get(pull.producer, 0.0) + announced
            if announced and pull.start is not None:  # else it waits for blocks of D's
                comes.add(pull.producer)
            if known.final_at is not None and not known.slow:
                self._judge(pull, known, now)
        old = []
        for peer, nbytes in waiting.items():
            link = self._links.setdefault(peer, _Link())
            if peer in comes:
                self._measure(link, since)
            if nbytes:
                link.used_at = now
            elif link.throughput and now - link.used_at >= IDLE_SECONDS:
                link.throughput, link.busy, link.moved = 0.0, 0.0, 0
                old.append(peer)
            self._book.throughput(peer, bytes_per_s=link.throughput, waiting_bytes=int(nbytes))
        self._metrics.waiting_bytes.set(sum(waiting.values()))
        self._is_reported = True
        return old

    def _measure(self, link: _Link, seconds: float) -> None:
        link.busy += seconds
        if link.busy >= SAMPLE_SECONDS:
            sample = link.moved / link.busy
            link.throughput = (
                sample
                if not link.throughput
                else link.throughput + NEW_SHARE * (sample - link.throughput)
            )
            link.busy, link.moved = 0.0, 0

    def _judge(self, pull: Pull, known: _Open, now: float) -> None:
        assert known.final_at is not None
        link = self._links.setdefault(pull.producer, _Link())
        seconds = now - known.final_at
        nbytes = ((pull.num_tokens or 0) - (pull.start or 0)) * self._token_bytes
        due = SLOW_FACTOR * nbytes / link.best_read if link.best_read else 0.0
        if seconds < max(self._slow_seconds, due):
            return
        known.slow = True
        phase = phase_of(pull)
        self._metrics.slow.labels(phase).inc()
        if now - link.warned_at < WARN_SECONDS:
            link.unsaid += 1
            return
        logger.warning(
            "slow hand-off from %s: %.1f s after the end of its prompt of %d tokens it waits for "
            "%s; %.1f of %.1f MB are here, the link's best read did %.2f GB/s; %d more like it "
            "since the last warning",
            pull.producer.hex()[:8],
            seconds,
            pull.num_tokens or 0,
            phase,
            max(0.0, nbytes - pull.waiting * self._token_bytes) / 1e6,
            nbytes / 1e6,
            link.best_read / 1e9,
            link.unsaid,
        )
        link.warned_at, link.unsaid = now, 0


def phase_of(pull: Pull) -> str:
    """Return the phase in which a hand-off waits, one of PHASES_OF_WAITING."""
    if pull.state is DState.WAITING:
        return "reserve"
    if pull.state is DState.COMMITTING:
        return "commit"
    if pull.reading:
        return "read"
    if pull.unpacking:
        return "unpack"
    return "slot" if pull.queued else "pack"
