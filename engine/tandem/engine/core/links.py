"""The routers that are connected to a worker: who greeted, whose frames fit, who fell silent.

Checks every frame's incarnations and sequence and answers HELLO and RESET; what concerns the step
loop goes into its inbox. No thread and no socket: ``write`` is the socket's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tandem.engine.core.inbox import FromRouter, Inbox, RouterFound, RouterLost
from tandem.engine.core.link_metrics import LinkMetrics
from tandem.link.liveness import LinkTimes, Liveness
from tandem.link.sockets import MAX_LINKS
from tandem.protocol.card import PROTOCOL_VERSION, ModelCard
from tandem.protocol.errors import WireError
from tandem.protocol.ids import Incarnation
from tandem.protocol.link import Header, Link, Verdict
from tandem.protocol.messages import (
    Beat,
    Call,
    Cancel,
    Hello,
    PeerSet,
    Reset,
    Submit,
    ToRouter,
    ToWorker,
    Welcome,
    encode,
)

logger = logging.getLogger(__name__)

TIMES = LinkTimes(beat_timeout=5.0)
"""A router that is silent this long is gone; so are its requests."""

Write = Callable[[list[bytes]], bool]
"""Identity, header and payload to the socket; False if its queue is full. Never blocks."""


class _Peer:
    """One router's connection."""

    def __init__(self, identity: bytes, me: Incarnation, now: float) -> None:
        self.identity = identity
        self.link = Link(me)
        self.alive = Liveness(TIMES, now)
        self.greeted = False


class RouterLinks:
    """One thread at a time."""

    def __init__(
        self,
        card: ModelCard,
        me: Incarnation,
        *,
        inbox: Inbox,
        metrics: LinkMetrics,
        write: Write,
    ) -> None:
        self._card = card
        self._me = me
        self._inbox = inbox
        self._metrics = metrics
        self._write_parts = write
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_router: dict[Incarnation, _Peer] = {}

    def say(self, router: Incarnation | None, message: ToRouter) -> None:
        """Write a message to one router, or to all (None)."""
        if router is None:
            for peer in list(self._by_router.values()):
                self._write(peer, message)
            return
        known = self._by_router.get(router)
        if known is None:
            self._metrics.dropped("router gone")
        else:
            self._write(known, message)

    def receive(self, identity: bytes, header: Header, message: ToWorker) -> None:
        """A frame came. Raises WireError when there are too many links."""
        peer = self._by_identity.get(identity)
        if peer is None:
            if len(self._by_identity) >= MAX_LINKS:
                raise WireError("too many links")
            peer = _Peer(identity, self._me, time.monotonic())
        elif isinstance(message, Hello) and header.sequence == 0:
            self._forget(peer, "greeted again")
            peer = _Peer(identity, self._me, time.monotonic())
        self._on_message(peer, header, message)

    def drop_silent(self, late: float = 0.0) -> None:
        """Forget routers that have not been heard for too long. ``late``: seconds that the caller
        itself stood still since it last asked; what came meanwhile is unread, so that this time is
        nobody's silence."""
        now = time.monotonic()
        for peer in list(self._by_identity.values()):
            peer.alive.overslept(late)
            fault = peer.alive.overdue(now)
            if fault is not None:
                self._reset(peer, fault)

    def _on_message(self, peer: _Peer, header: Header, message: ToWorker) -> None:
        verdict = peer.link.accept(header)
        if verdict is Verdict.RESET or not (peer.greeted or isinstance(message, Hello)):
            self._reset(peer, "lost or misdirected frame")
            return
        peer.alive.heard(time.monotonic())
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, Reset):
            self._forget(peer, message.reason)
        elif not isinstance(message, Beat):
            assert isinstance(message, Submit | Cancel | Call | PeerSet)
            if not self._inbox.offer(FromRouter(peer.link.peer, message)):
                self._reset(peer, "the step loop is too far behind")

    def _greet(self, peer: _Peer, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self._reset(peer, f"protocol {hello.version}; this worker speaks {PROTOCOL_VERSION}")
            return
        old = self._by_router.get(peer.link.peer)
        if old is not None and old is not peer:
            self._forget(old, "connected again")
        peer.greeted = True
        self._by_identity[peer.identity] = peer
        self._by_router[peer.link.peer] = peer
        self._metrics.routers(len(self._by_router))
        self._write(peer, Welcome(self._card))
        self._inbox.put(RouterFound(peer.link.peer))

    def _reset(self, peer: _Peer, reason: str) -> None:
        self._metrics.dropped("reset")
        self._write(peer, Reset(reason))
        self._forget(peer, reason)

    def _forget(self, peer: _Peer, reason: str) -> None:
        if self._by_identity.pop(peer.identity, None) is None:
            return
        if self._by_router.get(peer.link.peer) is peer:
            del self._by_router[peer.link.peer]
            self._metrics.routers(len(self._by_router))
            logger.info("router %s lost: %s", peer.link.peer.hex()[:8], reason)
            self._inbox.put(RouterLost(peer.link.peer, reason))

    def _write(self, peer: _Peer, message: ToRouter) -> None:
        if not self._write_parts([peer.identity, peer.link.seal(), encode(message)]):
            self._metrics.dropped("send queue full")
