"""One link to one peer process, from HELLO to its end, as one end sees it. Pure.

A session never outlives a doubt: a frame from another incarnation, for another incarnation, or
out of sequence ends it, and its keys fail. The model checker runs this class.
"""

from __future__ import annotations

from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import Beat
from tandem.protocol.ids import NOBODY, Incarnation
from tandem.protocol.link import Header, Link, Verdict


class Session:
    """Headers of one link."""

    def __init__(self, me: Incarnation) -> None:
        self.link = Link(me)

    @property
    def peer(self) -> Incarnation:
        """The other end, NOBODY until its first frame."""
        return self.link.peer

    def seal(self) -> bytes:
        """Header of the next frame."""
        return self.link.seal()

    def accept(self, header: Header) -> bool:
        """Whether the frame belongs here and is the next one; False ends the session."""
        known = self.link.peer != NOBODY
        verdict = self.link.accept(header)
        return verdict is Verdict.DELIVER or (verdict is Verdict.NEW_PEER and not known)


class Liveness:
    """Whether the other end lives: it beats, and it moves while it has work."""

    def __init__(self, now: Millis, *, silent_ms: int, stalled_ms: int) -> None:
        self._silent_ms = silent_ms
        self._stalled_ms = stalled_ms
        self._heard = now
        self._moved = now
        self._counters = (-1, -1)

    def heard(self, now: Millis) -> None:
        """Any frame came."""
        self._heard = now

    def beat(self, beat: Beat, now: Millis) -> None:
        """Its beat came: standing still is only wrong with work pending."""
        counters = (beat.engine_step, beat.transfers)
        if counters != self._counters or not beat.has_work:
            self._counters = counters
            self._moved = now

    def fault(self, now: Millis) -> str | None:
        """Why the peer counts as lost by now, if it does."""
        if now - self._heard > self._silent_ms:
            return f"silent for {now - self._heard} ms"
        if now - self._moved > self._stalled_ms:
            return f"has work and stands still for {now - self._moved} ms"
        return None
