"""Record of ways that worked and failed on D's links, and times to try a better one again. Pure.

A link that fails on one way is made again without it (``control/client``). If that way had
worked, or its requirements may appear, the link returns to it after a pause, while it has no
hand-offs.

Ends that never connected by a way do not return to it, such as two machines in a folder. The
ways of one machine are equally good: which of them moves KV depends on the pods and is not a
fault.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.transports.base import Transport
from tandem.protocol.ids import Incarnation

MAX_REMEMBERED = 256
"""Peers that have no link; the longest unchanged are forgotten first."""
MAX_DOUBLINGS = 5


@dataclass(slots=True)
class _Known:
    level: int | None = None
    """Level of the best way that passed its probe."""
    missed: str | None = None
    """The best way that failed and has not worked since."""
    again: str | None = None
    """The best way that worked or may come: the one to go back to."""
    failures: int = 0
    """Failures of ``again`` since it worked."""
    due: Millis | None = None
    """When ``again`` is tried; None while the link goes by it."""


class Ways:
    """Used by D's transfer thread alone."""

    def __init__(
        self, pause_ms: int, transports: Mapping[str, Transport], linked: Container[Incarnation]
    ) -> None:
        """``transports`` are named best first; ``linked``, which changes, are the peers that have a
        link: these are not forgotten."""
        self._pause_ms, self._linked = pause_ms, linked
        self._rank = {name: at for at, name in enumerate(transports)}
        self._level = {
            name: 0 if each.traits.maps_memory else self._rank[name]
            for name, each in transports.items()
        }
        self._peers: dict[Incarnation, _Known] = {}

    def worked(self, peer: Incarnation, way: str) -> None:
        """Record that the link passed its probe by this way."""
        known, level = self._of(peer), self._level[way]
        known.level = level if known.level is None else min(level, known.level)
        if known.missed is not None and level <= self._level[known.missed]:
            known.missed = None
        if self._is_best(way, known.again):
            known.again, known.failures, known.due = way, 0, None

    def failed(self, peer: Incarnation, way: str, now: Millis, *, met: bool, may_come: bool) -> int:
        """Return for how many milliseconds the way is not to be offered. ``met``: the two ends had
        connected by it. ``may_come``: what it needs is not there yet, so that it is tried again
        even if it never worked."""
        known, level = self._of(peer), self._level[way]
        had_met = known.level is not None and known.level <= level
        is_best = known.missed is None or level <= self._level[known.missed]
        if is_best and (met or may_come or had_met):
            known.missed = way
        if may_come and known.again != way and self._is_best(way, known.again):
            known.again, known.failures = way, 0
        if known.again != way:
            return self._pause_ms
        known.failures += 1
        known.due = Millis(now + self._pause_of(known))
        return self._pause_of(known)

    def due(self, now: Millis) -> list[tuple[Incarnation, str]]:
        """Return the peers that have a link and whose pause is over, each with the way to try."""
        return [(peer, way) for peer, way, due in self._waiting() if due <= now]

    def tried(self, peer: Incarnation, now: Millis) -> None:
        """Note that the link is made again by the better way. The next try is after a pause."""
        known = self._peers[peer]
        known.due = Millis(now + self._pause_of(known))

    def rest(self, now: Millis) -> float | None:
        """Return seconds until a way is due, at least a tenth: a link in use is asked again."""
        first = min((due for _, _, due in self._waiting()), default=None)
        return None if first is None else max(0.1, (first - now) / 1000)

    def counts(self) -> dict[str, int]:
        """Count the links that go by a worse way than one that failed on them, by the latter."""
        worst = max(self._level.values())
        found = {name: 0 for name, level in self._level.items() if level < worst}
        for peer, known in self._peers.items():
            if known.missed in found and peer in self._linked:
                found[known.missed] += 1
        return found

    def _waiting(self) -> Iterator[tuple[Incarnation, str, Millis]]:
        for peer, each in self._peers.items():
            if each.again is not None and each.due is not None and peer in self._linked:
                yield peer, each.again, each.due

    def _is_best(self, way: str, other: str | None) -> bool:
        return other is None or self._rank[way] <= self._rank[other]

    def _pause_of(self, known: _Known) -> int:
        return self._pause_ms << min(max(0, known.failures - 1), MAX_DOUBLINGS)

    def _of(self, peer: Incarnation) -> _Known:
        known = self._peers[peer] = self._peers.pop(peer, _Known())
        gone = [each for each in self._peers if each not in self._linked]
        for each in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
            del self._peers[each]
        return known
