"""Links that go a worse way than they once did, and when to try the better one again. Pure.

A link that fails on one way is made again without it (``control/client``). One on which the better
way had worked, or may yet, comes back to it at a moment without hand-offs, with doubling pauses.
Where there is no such moment for long, new hand-offs are kept off the link until there is, in turns
with time for them: what is open ends as it would.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import Incarnation

MAX_REMEMBERED = 256
"""Peers that have no link; those heard of longest ago are forgotten first."""
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
    """When to try again; None while it is in use, or being tried."""
    again: Millis | None = None
    """The same if it was not tried after all."""


class Falls:
    """What worked and failed, by peer."""

    def __init__(
        self, pause_ms: int, ways: Sequence[str], linked: Container[Incarnation] = ()
    ) -> None:
        """``ways`` are the transports, best first; ``linked``, which changes, are the peers that
        have a link, which are not forgotten."""
        self._pause_ms, self._linked = pause_ms, linked
        self._rank = {name: at for at, name in enumerate(ways)}
        self._peers: dict[Incarnation, _Fall] = {}

    def worked(self, peer: Incarnation, connector: str) -> None:
        """This way between these ends has passed its probe. One that is the last, or worse than
        another that is tried again, is nothing to come back to; that other is tried later, if it
        was to be tried and the link was made without it."""
        known, rank = self._peers.get(peer), self._rank[connector]
        if known is not None and self._rank[known.connector] < rank:
            known.due = known.again if known.due is None else known.due
        elif rank < len(self._rank) - 1:
            self._remember(peer, connector)

    def _remember(self, peer: Incarnation, connector: str) -> None:
        self._heard(peer, _Fall(connector))
        gone = [each for each in self._peers if each not in self._linked]
        for each in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
            del self._peers[each]

    def _heard(self, peer: Incarnation, known: _Fall) -> None:
        self._peers.pop(peer, None)
        self._peers[peer] = known

    def failed(
        self, peer: Incarnation, connector: str, now: Millis, *, may_come: bool = False
    ) -> int:
        """It failed: milliseconds for which it is not to be offered. Where it ``may_come``, it is
        tried again though it never worked; unless it is the last, from which there is none to come
        back. Before it is due it is tried where nothing else goes: that is the same incident."""
        known, rank = self._peers.get(peer), self._rank[connector]
        better = known is None or rank < self._rank[known.connector]
        if may_come and better and rank < len(self._rank) - 1:
            self._remember(peer, connector)
            known = self._peers[peer]
        if known is None or known.connector != connector:
            return self._pause_ms
        self._heard(peer, known)
        if known.due is not None and now < known.due:
            return known.due - now
        known.failures += 1
        pause = self._pause_of(known)
        known.due = Millis(now + pause)
        return pause

    def _pause_of(self, known: _Fall) -> int:
        return self._pause_ms << min(max(0, known.failures - 1), MAX_DOUBLINGS)

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

    def tried(self, peer: Incarnation, now: Millis) -> None:
        """The better way is being tried: it works or fails anew, unless a link that was being made
        stands before it is offered."""
        known = self._peers[peer]
        known.due, known.again = None, Millis(now + self._pause_of(known))

    def rest(self, now: Millis) -> float | None:
        """Seconds until something is due, at least a tenth: a busy link is asked again then."""
        due = min((each.due for each in self._peers.values() if each.due is not None), default=None)
        return None if due is None else max(0.1, (due - now) / 1000)
