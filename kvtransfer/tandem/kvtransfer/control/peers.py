"""D's view of the prefill workers, by incarnation: what the engine's thread may ask at any time.

Written by the transfer thread. A link is up once its probe has passed. One wrong header or digest
quarantines the incarnation for a while; whatever the client did (cancels, refusals) never counts.
Whom nobody names any more is remembered only while it is up: a rollout leaves nothing behind. One
that is met before anybody has named it is, until the next word on who is wanted.
"""

from __future__ import annotations

import threading

import msgspec

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth

MAX_REMEMBERED = 256
"""Incarnations that are down and still reported though nobody says that they are wanted; and those
that are quarantined. The longest known are forgotten first."""


class PeerBook:
    """Health per incarnation; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[Incarnation, PeerHealth] = {}
        self._wanted: frozenset[Incarnation] | None = None
        """None: nobody has said."""
        self._unnamed: dict[Incarnation, None] = {}
        """Those that are wanted no more, the last ones."""
        self._quarantined_until: dict[Incarnation, Millis] = {}
        """Whether wanted or not: a peer may be named again."""

    def is_up(self, peer: Incarnation) -> bool:
        """Whether a hand-off from this peer may start."""
        with self._lock:
            known = self._peers.get(peer)
        return known is not None and known.up

    def why_down(self, peer: Incarnation) -> str:
        """For a refusal."""
        with self._lock:
            known = self._peers.get(peer)
        return "no peer that is known" if known is None else known.reason

    def snapshot(self) -> tuple[PeerHealth, ...]:
        """All peers, the longest known first."""
        with self._lock:
            return tuple(self._peers.values())

    def keep(self, wanted: frozenset[Incarnation]) -> None:
        """Of the peers that are down only these are known from now on, and those that are met later
        and were never known. Any thread."""
        with self._lock:
            former = (self._wanted or frozenset()) | self._peers.keys()
            self._unnamed.update(dict.fromkeys(former))
            self._wanted = wanted
            for each in [*(self._unnamed.keys() & wanted), *list(self._unnamed)[:-MAX_REMEMBERED]]:
                self._unnamed.pop(each, None)
            for each in self._down():
                if each not in wanted:
                    del self._peers[each]

    def mark(
        self,
        peer: Incarnation,
        *,
        up: bool,
        reason: str = "",
        transport: str = "",
        probed: float = 0.0,
    ) -> None:
        """The transfer thread's word. ``probed``: bytes a second of the pattern."""
        with self._lock:
            self._peers[peer] = PeerHealth(peer, up, reason, transport, probed_bytes_per_s=probed)
            if not up and peer in self._unnamed:
                del self._peers[peer]
            strangers = [each for each in self._down() if each not in (self._wanted or ())]
            for each in strangers[: max(0, len(strangers) - MAX_REMEMBERED)]:
                del self._peers[each]

    def _down(self) -> list[Incarnation]:
        return [each for each, health in self._peers.items() if not health.up]

    def faster(self, peer: Incarnation, probed: float) -> None:
        """The pattern of a peer that is up came at this rate, bytes a second."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known.up:
                self._peers[peer] = msgspec.structs.replace(known, probed_bytes_per_s=probed)

    def probed(self, peer: Incarnation) -> float:
        """At which rate the pattern of a peer came, bytes a second; 0 of one that is down."""
        with self._lock:
            known = self._peers.get(peer)
        return 0.0 if known is None else known.probed_bytes_per_s

    def pace(self, peer: Incarnation, *, bytes_per_s: float, waiting_bytes: int) -> None:
        """How fast KV comes from a known peer (0 while unknown), and how much of it waits."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None:
                self._peers[peer] = msgspec.structs.replace(
                    known, bytes_per_s=bytes_per_s, waiting_bytes=waiting_bytes
                )

    def quarantine(self, peer: Incarnation, until: Millis) -> None:
        """Quarantine: not up before then, whatever a probe says."""
        self._quarantined_until.pop(peer, None)
        self._quarantined_until[peer] = until
        for old in list(self._quarantined_until)[:-MAX_REMEMBERED]:
            del self._quarantined_until[old]

    def quarantine_ms_left(self, peer: Incarnation, now: Millis) -> int:
        """Milliseconds of quarantine that are left."""
        return max(0, self._quarantined_until.get(peer, Millis(0)) - now)
