"""The I/O thread of a worker: the ZMQ ROUTER socket that routers connect to.

It alone touches the socket. It checks every frame's incarnations and sequence, answers HELLO and
RESET by itself, sends the beats, and tells the step loop what concerns it through a queue. It
lives outside the step loop so that a long step never looks like a dead worker; the beats carry
the loop's progress so that a dead loop does not look alive.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import zmq

from tandem.engine.core.guard import CurveGuard
from tandem.engine.core.link_metrics import LinkMetrics
from tandem.protocol.card import PROTOCOL_VERSION, ModelCard
from tandem.protocol.errors import WireError
from tandem.protocol.ids import Incarnation
from tandem.protocol.link import Header, Link, Verdict, read_header
from tandem.protocol.messages import (
    MAX_FRAME_BYTES,
    Beat,
    Call,
    Cancel,
    Hello,
    PeerSet,
    Reset,
    Submit,
    ToRouter,
    Welcome,
    WorkerBeat,
    decode_to_worker,
    encode,
)

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
LOST_SECONDS = 5.0
"""A router that is silent this long is gone; so are its requests."""
MAX_LINKS = 256
_BATCH = 256


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A message of a router for the step loop."""

    router: Incarnation
    message: Submit | Cancel | Call | PeerSet


@dataclass(frozen=True, slots=True)
class RouterFound:
    """A router greeted: it knows nothing of this worker yet."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The link to a router broke: nobody reads its requests' tokens any more."""

    router: Incarnation
    reason: str


Inbox = SimpleQueue["FromRouter | RouterFound | RouterLost | None"]
"""What the step loop reads; None only wakes it."""


class _Peer:
    """One router's connection."""

    def __init__(self, identity: bytes, me: Incarnation, now: float) -> None:
        self.identity = identity
        self.link = Link(me)
        self.heard = now
        self.greeted = False


class IOThread(threading.Thread):
    """Start, then ``send`` from the step loop; ``stop`` flushes what is queued and joins."""

    def __init__(
        self,
        *,
        endpoint: str,
        card: ModelCard,
        incarnation: Incarnation,
        inbox: Inbox,
        beat: Callable[[], WorkerBeat],
        metrics: LinkMetrics,
        guard: CurveGuard | None = None,
    ) -> None:
        super().__init__(name="tandem-io", daemon=True)
        self._card = card
        self._me = incarnation
        self._inbox = inbox
        self._beat = beat
        self._metrics = metrics
        self._outbox: deque[tuple[Incarnation | None, ToRouter]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = True
        self._wake_lock = threading.Lock()
        """A flush after the end must not write to a descriptor that is another's by then."""
        self._stopping = threading.Event()
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_router: dict[Incarnation, _Peer] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        if guard is not None:
            guard.serve(self._socket, "router")
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise OSError(f"cannot listen on {endpoint}: {error}") from error
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        """As bound: port 0 is the kernel's choice by now."""

    def send(self, router: Incarnation | None, message: ToRouter) -> None:
        """Queue a message for one router, or for all (None). Called from the step loop."""
        self._outbox.append((router, message))

    def flush(self) -> None:
        """Wake the thread to send what was queued: once per step, not per message."""
        with self._wake_lock:
            if self._awake:
                os.eventfd_write(self._wake, 1)

    def stop(self, timeout: float = 2.0) -> None:
        """Send what is queued, close the socket, join."""
        self._stopping.set()
        self.flush()
        self.join(timeout)

    def run(self) -> None:
        """Poll until stopped; an error in one frame never ends the thread."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_beat = time.monotonic()
        while not self._stopping.is_set():
            left = max(0.0, next_beat - time.monotonic())
            ready = dict(poller.poll(round(left * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._socket in ready:
                self._receive()
            self._send_queued()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                self._drop_silent()
                self._send_beats()
        self._send_queued()
        self._socket.close()
        with self._wake_lock:
            self._awake = False
            os.close(self._wake)

    def _receive(self) -> None:
        for _ in range(_BATCH):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frame(parts)
            except WireError as error:
                self._metrics.dropped("garbage")
                logger.debug("frame dropped: %s", error)

    def _on_frame(self, parts: list[bytes]) -> None:
        if len(parts) != 3:
            raise WireError(f"message of {len(parts)} parts; it has 3")
        identity, head, payload = parts
        header = read_header(head)
        message = decode_to_worker(payload)
        peer = self._by_identity.get(identity)
        if peer is None:
            if len(self._by_identity) >= MAX_LINKS:
                raise WireError("too many links")
            peer = _Peer(identity, self._me, time.monotonic())
        elif isinstance(message, Hello) and header.sequence == 0:
            self._forget(peer, "greeted again")
            peer = _Peer(identity, self._me, time.monotonic())
        self._on_message(peer, header, message)

    def _on_message(self, peer: _Peer, header: Header, message: object) -> None:
        verdict = peer.link.accept(header)
        if verdict is Verdict.RESET or not (peer.greeted or isinstance(message, Hello)):
            self._reset(peer, "lost or misdirected frame")
            return
        peer.heard = time.monotonic()
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, Reset):
            self._forget(peer, message.reason)
        elif not isinstance(message, Beat):
            assert isinstance(message, Submit | Cancel | Call | PeerSet)
            self._inbox.put(FromRouter(peer.link.peer, message))

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

    def _drop_silent(self) -> None:
        limit = time.monotonic() - LOST_SECONDS
        for peer in list(self._by_identity.values()):
            if peer.heard < limit:
                self._reset(peer, f"silent for {LOST_SECONDS:g} s")

    def _send_beats(self) -> None:
        if self._by_router:
            beat = self._beat()
            for peer in list(self._by_router.values()):
                self._write(peer, beat)

    def _send_queued(self) -> None:
        while self._outbox:
            router, message = self._outbox.popleft()
            if router is None:
                for peer in list(self._by_router.values()):
                    self._write(peer, message)
                continue
            known = self._by_router.get(router)
            if known is None:
                self._metrics.dropped("router gone")
            else:
                self._write(known, message)

    def _write(self, peer: _Peer, message: ToRouter) -> None:
        parts = [peer.identity, peer.link.seal(), encode(message)]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            self._metrics.dropped("send queue full")
