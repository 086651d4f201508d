"""I/O thread of a worker: the ZMQ ROUTER socket that routers connect to.

It runs outside the step loop, so that a long step is not taken for a dead worker; beats carry the
loop's progress.

Waking a thread takes long on an idle machine. So the loop writes its output itself (``flush``) and
waits for the socket while it has no work (``attend``).
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from prometheus_client import CollectorRegistry, Counter, Gauge

from tandem.base.listening import listening_host
from tandem.engine.threads import nap
from tandem.link.curve import CurveGuard
from tandem.link.listener import Link, Listener
from tandem.link.liveness import LinkTimes, Pulse
from tandem.link.session import Terms
from tandem.link.sockets import (
    MAX_FRAME_BYTES,
    Context,
    Socket,
    decode_to_worker,
    open_socket,
)
from tandem.link.wake_queue import WakeQueue
from tandem.protocol.card import PROTOCOL_VERSION, ModelCard
from tandem.protocol.ids import Incarnation
from tandem.protocol.link import WORKER_BEAT_SECONDS, WORKER_PATIENCE_SECONDS
from tandem.protocol.messages import (
    Call,
    Cancel,
    Hello,
    PeerSet,
    Submit,
    ToRouter,
    Welcome,
    WorkerBeat,
    encode,
)


@dataclass(frozen=True, slots=True)
class FromRouter:
    """Message of a router for the step loop."""

    router: Incarnation
    message: Submit | Cancel | Call | PeerSet


@dataclass(frozen=True, slots=True)
class RouterFound:
    """Event: a router connected; it has no state of this worker yet."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class RouterLost:
    """Event: the link to a router broke; its requests' tokens are not read any more."""

    router: Incarnation
    reason: str


Item = FromRouter | RouterFound | RouterLost | None
"""None only wakes the loop."""


Inbox = WakeQueue[Item]
"""Queue from any thread to the step loop."""


DROPS = ("router gone", "garbage", "reset")


class LinkMetrics:
    """Counters of dropped frames, gauge of connected routers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._dropped = Counter(
            "tandem:link_frames_dropped",
            "Dropped frames between router and worker, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in DROPS:  # so that the series begins at 0
            self._dropped.labels(reason)
        self._routers = Gauge(
            "tandem:routers_connected",
            "Routers with a live link to this worker.",
            registry=registry,
        )

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()

    def routers(self, count: int) -> None:
        self._routers.set(count)


logger = logging.getLogger(__name__)

TIMES = LinkTimes(WORKER_BEAT_SECONDS, WORKER_PATIENCE_SECONDS)
"""Fixed: routers use the same times."""


class RouterLinks:
    """State of the links to routers. Requires the caller's lock, except ``read``."""

    def __init__(
        self,
        card: ModelCard,
        me: Incarnation,
        *,
        inbox: Inbox,
        metrics: LinkMetrics,
        write: Callable[[list[bytes]], bool],
    ) -> None:
        """``write`` gets identity, header and payload; it never blocks and returns False if it
        cannot send."""
        self._card = card
        self._inbox = inbox
        self._metrics = metrics
        self.write = write
        terms = Terms(me, "protocol", PROTOCOL_VERSION, TIMES)
        self.listener = Listener(terms, decode_to_worker, self)
        self.read = self.listener.read
        self.take = self.listener.take
        self._by_peer = self.listener.by_peer

    def send_message(self, router: Incarnation | None, message: ToRouter) -> None:
        if router is None:
            self.listener.send_to_all(encode(message))
            return
        link = self._by_peer.get(router)
        if link is None:
            self._metrics.dropped("router gone")
        elif not self.write([link.identity, link.session.seal(), encode(message)]):
            self.listener.unsent(link)

    def beat(self, beat: WorkerBeat, now: float, late: float) -> None:
        """Drop silent routers (see ``Listener.drop_silent``), send the others a beat."""
        self.listener.drop_silent(now, late)
        self.send_message(None, beat)

    # Methods of the listener's host.

    def welcome(self, hello: Hello) -> Welcome[ModelCard]:
        return Welcome(self._card)

    def up(self, link: Link, welcome: object) -> None:
        self._metrics.routers(len(self._by_peer))
        self._inbox.put(RouterFound(link.peer))

    def deliver(self, link: Link, message: Submit | Cancel | Call | PeerSet) -> bool:
        return self._inbox.offer(FromRouter(link.peer, message))

    def down(self, link: Link, reason: str) -> None:
        self._metrics.routers(len(self._by_peer))
        logger.info("router %s lost: %s", link.peer.hex()[:8], reason)
        self._inbox.put(RouterLost(link.peer, reason))

    def dropped(self, kind: str, words: str) -> None:
        self._metrics.dropped("garbage" if kind in ("garbage", "stray") else "reset")
        logger.debug("%s: %s", kind, words)


_BATCH = 256
_SEND_QUEUE = 100_000
STAND_BY_SECONDS = 0.05
"""Time until this thread takes over a socket that the step loop left; longer than a launch."""


class IOThread(threading.Thread):
    """I/O thread. ``stop`` sends queued messages and joins the thread."""

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
        """Raise OSError if ``endpoint`` cannot be bound."""
        super().__init__(name="tandem-io", daemon=True)
        self._inbox = inbox
        self._beat = beat
        self._outbox: WakeQueue[tuple[Incarnation | None, ToRouter]] = WakeQueue()
        self._lock = threading.Lock()
        """Lock of the socket and the links; not for signal handlers, which may have interrupted its
        holder."""
        self._turn = threading.Lock()
        """Held by the thread that waits for the socket."""
        self._attended = False
        """Whether the step loop has that turn, or waits for it."""
        self._left = threading.Event()
        """Set while the step loop does not attend to the socket."""
        self._left.set()
        self._left_at = 0.0
        """Time by ``time.monotonic`` at which the loop last stopped attending."""
        self._stopping = threading.Event()
        self._closed = False
        self._pulse = Pulse(TIMES.beat_interval)
        self._more = False
        """Whether frames may be left in the queue: the socket signals them only once."""
        self._socket = _bound(endpoint, guard)
        self._links = RouterLinks(
            card, incarnation, inbox=inbox, metrics=metrics, write=self._write
        )
        self._descriptor = int(self._socket.FD)
        self._poller = select.poll()
        for descriptor in (self._descriptor, self._outbox.fileno()):
            self._poller.register(descriptor, select.POLLIN)
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        """Bound endpoint, with the port that the kernel chose."""

    def send(self, router: Incarnation | None, message: ToRouter) -> None:
        """Queue a message for one router, or for all (None), until ``flush`` or the next beat.
        Callable from any thread."""
        self._outbox.add((router, message))

    def flush(self) -> None:
        """Write queued messages to the socket in this thread; never wait for a router."""
        with self._lock:
            if self._closed:
                return
            self._send_queued()
            if self._has_frames():
                self.ring()

    def ring(self) -> None:
        """Wake the waiting thread to write what is queued. Callable from any thread and signal
        handlers; never blocks."""
        self._outbox.wake()

    def beat_soon(self) -> None:
        """Send the next beat now. Callable from any thread; never blocks."""
        self._pulse.hasten()
        self.ring()

    def attend(self, seconds: float, awake_until: float = 0.0) -> None:
        """Wait for the socket in the step loop until an item comes or the time is over. Until
        ``awake_until`` (``time.monotonic``) it polls between naps. End with ``leave``."""
        until = time.monotonic() + seconds
        self._left.clear()
        self._attended = True
        self.ring()
        try:
            with self._turn, self._inbox.listening() as bell:
                self._poller.register(bell, select.POLLIN)
                try:
                    while self._inbox.empty and time.monotonic() < until and not self._closed:
                        self._one_turn(until, awake_until)
                finally:
                    self._poller.unregister(bell)
        finally:
            self._left_at = time.monotonic()
            self._attended = False

    def leave(self) -> None:
        """Return the socket to the I/O thread. Late is better: two threads that wake at once slow
        each other down."""
        if not self._left.is_set():
            self._left.set()

    def stop(self, timeout: float = 2.0) -> None:
        """Send queued messages, close the socket and join. Not while the step loop attends."""
        self._stopping.set()
        self.ring()
        self.join(timeout)

    def run(self) -> None:
        """Poll until stopped; an error in one frame never ends the thread."""
        while not self._stopping.is_set():
            with self._turn:
                self._one_turn(math.inf)
            while self._stands_by():
                self._left.wait(STAND_BY_SECONDS)
        with self._turn, self._lock:
            self._send_queued()
            self._closed = True
            self._socket.close()

    def _stands_by(self) -> bool:
        if self._left.is_set() or self._stopping.is_set():
            return False
        return self._attended or time.monotonic() - self._left_at < STAND_BY_SECONDS

    def _one_turn(self, until: float, awake_until: float = 0.0) -> None:
        ready = self._wait(0.0 if self._more else min(until, self._pulse.next), awake_until)
        if self._outbox.fileno() in ready:
            self._outbox.hush()
            with self._lock:
                self._send_queued()
        if self._more or ready - {self._inbox.fileno()}:  # reasons for the wake are not kept
            self._receive()
        now = time.monotonic()
        late = self._pulse.late(now)
        if late is not None:
            beat = self._beat()
            with self._lock:
                self._send_queued()
                self._links.beat(beat, now, late)
                self._more = self._more or self._has_frames()

    def _wait(self, until: float, awake_until: float) -> set[int]:
        ready = self._poller.poll(0)
        while not ready and time.monotonic() < min(until, awake_until):
            nap()
            ready = self._poller.poll(0)
        if not ready:
            ready = self._poller.poll(max(0.0, (until - time.monotonic()) * 1000))
        return {descriptor for descriptor, _ in ready}

    def _receive(self) -> None:
        self._more = True
        for _ in range(_BATCH):
            try:
                with self._lock:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._more = False
                return
            self._on_frame(parts)

    def _on_frame(self, parts: list[bytes]) -> None:
        frame = self._links.read(parts)
        if frame is not None:
            with self._lock:
                self._links.take(frame, time.monotonic())

    def _has_frames(self) -> bool:
        """Return whether frames can be read. Call it under the lock after a write, which may
        consume the socket's signal."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _send_queued(self) -> None:
        for router, message in self._outbox.take():
            self._links.send_message(router, message)

    def _write(self, parts: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _bound(endpoint: str, guard: CurveGuard | None) -> Socket:
    context: Context = zmq.Context.instance()
    socket = open_socket(context, zmq.ROUTER, max_bytes=MAX_FRAME_BYTES, unsent=_SEND_QUEUE)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if guard is not None:
        guard.serve(socket, "router")
    try:
        socket.bind(_of_both_families(socket, endpoint))
    except zmq.ZMQError as error:
        socket.close(0)
        raise OSError(f"cannot listen on {endpoint}: {error}") from error
    return socket


def _of_both_families(socket: Socket, endpoint: str) -> str:
    """Return the endpoint in ZMQ's form: an IPv6 address in brackets, `::` for IPv4, too."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    host, _, port = address.rpartition(":")
    host = listening_host(host)
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    return f"tcp://{host}:{port}"
