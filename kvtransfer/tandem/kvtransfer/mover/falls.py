"""Links that go a worse way than they once did, and when to try the better one again. Pure.

A link that fails on one way is made again without it (``control/client``). One on which the better
way had worked, or may yet, comes back to it at a moment without hand-offs, with doubling pauses.
Where there is no such moment for long, new hand-offs are kept off the link until there is, in turns
with time for them: what is open ends as it would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import Incarnation

MAX_REMEMBERED = 256
"""Peers; the longest known are forgotten first, and then come back when they are linked anew."""
MAX_DOUBLINGS = 5
BUSY_MS = 15_000
"""For which hand-offs may follow one another on a link that is due."""
DRAIN_MS, LONGEST_DRAIN_MS = 5_000, 20_000
"""For which new ones are then kept off it, the first time; twice as long each time after that, but
no longer than the second: one that waits for blocks of D's may keep a link busy for minutes."""


@dataclass(slots=True)
class _Fall:
    connector: str
    """What had worked."""
    failures: int = 0
    due: Millis | None = None
    """When to try again; None while it is in use."""


class Falls:
    """What worked and failed, by peer."""

    def __init__(self, pause_ms: int, ways: Sequence[str]) -> None:
        """``ways`` are the transports, best first."""
        self._pause_ms = pause_ms
        self._rank = {name: at for at, name in enumerate(ways)}
        self._peers: dict[Incarnation, _Fall] = {}

    def worked(self, peer: Incarnation, connector: str) -> None:
        """This way between these ends has passed its probe. One that is the last, or worse than
        another that is tried again, is nothing to come back to."""
        known, rank = self._peers.get(peer), self._rank[connector]
        if rank == len(self._rank) - 1 or (known and self._rank[known.connector] < rank):
            return
        self._remember(peer, connector)

    def _remember(self, peer: Incarnation, connector: str) -> None:
        self._peers.pop(peer, None)
        while len(self._peers) >= MAX_REMEMBERED:
            del self._peers[next(iter(self._peers))]
        self._peers[peer] = _Fall(connector)

    def failed(
        self, peer: Incarnation, connector: str, now: Millis, *, may_come: bool = False
    ) -> int:
        """It failed: milliseconds for which it is not to be offered. Where it ``may_come``, it is
        tried again though it never worked."""
        known = self._peers.get(peer)
        if known is None and may_come:
            self._remember(peer, connector)
            known = self._peers[peer]
        if known is None or known.connector != connector:
            return self._pause_ms
        pause = self._pause_ms << min(known.failures, MAX_DOUBLINGS)
        known.failures += 1
        known.due = Millis(now + pause)
        return pause

    def due(self, now: Millis) -> list[tuple[Incarnation, str]]:
        """Peers whose pause is over, and what to try again; asked until ``tried``."""
        found = self._peers.items()
        return [
            (peer, each.connector)
            for peer, each in found
            if each.due is not None and each.due <= now
        ]

    def is_drained(self, peer: Incarnation, now: Millis) -> bool:
        """Of a peer that is due and busy: whether new hand-offs are kept off its link now."""
        due, drain = self._peers[peer].due, DRAIN_MS
        assert due is not None, "only who is due waits"
        since = now - due
        while since >= BUSY_MS + drain:
            since -= BUSY_MS + drain
            drain = min(2 * drain, LONGEST_DRAIN_MS)
        return since >= BUSY_MS

    def tried(self, peer: Incarnation) -> None:
        """The better way is being tried: it works or fails anew."""
        self._peers[peer].due = None

    def rest(self, now: Millis) -> float | None:
        """Seconds until something is due, at least a tenth: a busy link is asked again then."""
        due = min((each.due for each in self._peers.values() if each.due is not None), default=None)
        return None if due is None else max(0.1, (due - now) / 1000)
