"""D's view of the prefill workers, by incarnation, for any thread.

Written by the transfer thread. A link is up once its probe has passed. A wrong header or digest
quarantines the incarnation.
"""

from __future__ import annotations

import threading

import msgspec

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth

MAX_REMEMBERED = 256
"""Most incarnations that are down and not in ``keep`` but still reported, and most quarantined
ones; the longest known are forgotten first."""


class PeerBook:
    """Health by incarnation; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[Incarnation, PeerHealth] = {}
        self._wanted: frozenset[Incarnation] | None = None
        """Peers of the last ``keep``; None before the first."""
        self._unnamed: dict[Incarnation, None] = {}
        """Last peers that are no longer in ``keep``."""
        self._quarantined_until: dict[Incarnation, Millis] = {}
        """Ends of quarantines, also of peers that may be named again."""

    def is_up(self, peer: Incarnation) -> bool:
        with self._lock:
            known = self._peers.get(peer)
        return known is not None and known.up

    def why_down(self, peer: Incarnation) -> str:
        with self._lock:
            known = self._peers.get(peer)
        return "no peer that is known" if known is None else known.reason

    def snapshot(self) -> tuple[PeerHealth, ...]:
        """Return all peers, the longest known first."""
        with self._lock:
            return tuple(self._peers.values())

    def keep(self, wanted: frozenset[Incarnation]) -> None:
        """Forget other peers that are down, except those met later. Callable from any thread."""
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
        """Record a peer's state. ``probed`` is the pattern's rate in bytes/s. Transfer thread
        only."""
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
        """Record a faster pattern rate of a peer that is up, in bytes/s."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and known.up:
                self._peers[peer] = msgspec.structs.replace(known, probed_bytes_per_s=probed)

    def probed(self, peer: Incarnation) -> float:
        """Return the rate in bytes/s at which a peer's pattern was read; 0 if the peer is down."""
        with self._lock:
            known = self._peers.get(peer)
        return 0.0 if known is None else known.probed_bytes_per_s

    def throughput(self, peer: Incarnation, *, bytes_per_s: float, waiting_bytes: int) -> None:
        """Record the rate of KV from a known peer (0 while unknown) and the bytes that wait."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None:
                self._peers[peer] = msgspec.structs.replace(
                    known, bytes_per_s=bytes_per_s, waiting_bytes=waiting_bytes
                )

    def quarantine(self, peer: Incarnation, until: Millis) -> None:
        self._quarantined_until.pop(peer, None)
        self._quarantined_until[peer] = until
        for old in list(self._quarantined_until)[:-MAX_REMEMBERED]:
            del self._quarantined_until[old]

    def quarantine_ms_left(self, peer: Incarnation, now: Millis) -> int:
        return max(0, self._quarantined_until.get(peer, Millis(0)) - now)
