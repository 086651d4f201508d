"""D's view of the prefill workers, by incarnation: what the engine's thread may ask at any time.

Written by the transfer thread. A link is up once its probe has passed. One wrong header or digest
quarantines the incarnation for a while; whatever the client did (cancels, refusals) never counts.
"""

from __future__ import annotations

import threading

import msgspec

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth

MAX_REMEMBERED = 256
"""Incarnations that are down and still reported."""


class PeerBook:
    """Health per incarnation; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[Incarnation, PeerHealth] = {}
        self._quarantined_until: dict[Incarnation, Millis] = {}

    def is_up(self, peer: Incarnation) -> bool:
        """Whether a hand-off from this peer may start."""
        with self._lock:
            known = self._peers.get(peer)
        return known is not None and known.up

    def why_down(self, peer: Incarnation) -> str:
        """For a refusal."""
        with self._lock:
            known = self._peers.get(peer)
        return "never seen" if known is None else known.reason

    def snapshot(self) -> tuple[PeerHealth, ...]:
        """All peers, the longest known first."""
        with self._lock:
            return tuple(self._peers.values())

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
            down = [each for each, health in self._peers.items() if not health.up]
            for old in down[: max(0, len(down) - MAX_REMEMBERED)]:
                del self._peers[old]
                self._quarantined_until.pop(old, None)

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
        self._quarantined_until[peer] = until

    def quarantine_ms_left(self, peer: Incarnation, now: Millis) -> int:
        """Milliseconds of quarantine that are left."""
        return max(0, self._quarantined_until.get(peer, Millis(0)) - now)
