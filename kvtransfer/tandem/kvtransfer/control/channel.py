"""What both ends of the control plane share: the thread, its clock, its beats, its counters."""

from __future__ import annotations

import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

import zmq

from tandem.kvtransfer.config import KVTransferConfig, millis
from tandem.kvtransfer.control.mail import Drop, Say, SetPeers, Stop, ToControl, ToMover
from tandem.kvtransfer.control.session import Liveness
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import Beat
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.progress import ProgressBoard
from tandem.link.wake_queue import WakeQueue
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)

HIGH_WATER = 10_000
"""Frames that may wait for a peer; one more breaks the link, as a lost frame would."""
STOP_SECONDS = 5.0


def now_ms() -> Millis:
    """This process's monotonic clock."""
    return Millis(time.monotonic_ns() // 1_000_000)


def mac(secret: str, incarnation: Incarnation, fingerprint: str) -> bytes:
    """What a HELLO must carry: 16 bytes over who speaks and what it serves."""
    key = blake2b(secret.encode(), digest_size=32).digest()
    data = incarnation + fingerprint.encode()
    return blake2b(data, key=key, digest_size=16, person=b"tandem-hello").digest()


def same_mac(one: bytes, other: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(one, other)


class SocketGuard(Protocol):
    """CURVE for the control sockets: a worker's shell brings it."""

    context: zmq.Context[zmq.Socket[bytes]]
    """Where it answers questions about callers: the sockets must be opened in it."""

    def serve(self, socket: zmq.Socket[bytes], role: str) -> None:
        """Before ``bind``: let in only callers of this role."""
        ...

    def call(self, socket: zmq.Socket[bytes], role: str, attempt: int) -> None:
        """Before ``connect``: expect a server of this role; ``attempt`` goes through its keys."""
        ...


class Channel:
    """A control thread: sockets in, sockets out, beats in between."""

    name = "kv-control"

    def __init__(
        self,
        config: KVTransferConfig,
        incarnation: Incarnation,
        fingerprint: str,
        *,
        board: ProgressBoard,
        metrics: HandoffMetrics,
        deliver: Callable[[ToMover], None],
        guard: SocketGuard | None = None,
    ) -> None:
        self.guard = guard
        self.config = config
        self.me = incarnation
        self.fingerprint = fingerprint
        self.metrics = metrics
        self.problem: str | None = None
        self._board = board
        self._deliver = deliver
        self._context = roomy_context() if guard is None else guard.context
        self._inbox: WakeQueue[ToControl] = WakeQueue()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.fileno(), zmq.POLLIN)
        self._next_beat = Millis(0)
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread.start()

    def post(self, item: ToControl) -> None:
        """From any thread."""
        self._inbox.put(item)

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._inbox.put(Stop())
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        elif self._thread.ident is None:
            self._end()

    # What an end does

    def on_ready(self, ready: dict[object, int], now: Millis) -> None:
        """Sockets that can be read."""
        raise NotImplementedError

    def on_item(self, item: Say | Drop | SetPeers, now: Millis) -> None:
        """Something the transfer thread or the engine's wants."""
        raise NotImplementedError

    def on_due(self, now: Millis) -> None:
        """Every turn: what a wake is for that no frame caused."""

    def on_tick(self, now: Millis) -> None:
        """A beat is due: send it, and judge those that did not come."""
        raise NotImplementedError

    def close_sockets(self) -> None:
        """The thread ends."""
        raise NotImplementedError

    def next_wake(self, now: Millis) -> Millis:
        """When the thread must wake though nothing came."""
        return self._next_beat

    # What is the same

    def beat(self) -> Beat:
        """This process's beat."""
        board = self._board
        return Beat(board.engine_turns, board.transfers, board.has_work)

    def liveness(self, now: Millis) -> Liveness:
        """For a new link."""
        return Liveness(
            now,
            silent_ms=millis(self.config.kv_beat_timeout),
            stalled_ms=millis(self.config.kv_stall_seconds),
        )

    def garbage(self, what: str) -> None:
        """Something came that is no frame: counted, and that is all."""
        self.metrics.garbage.labels("control").inc()
        logger.debug("dropped: %s", what)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the control thread ends")
            self.problem = f"the KV control thread ended: {error}"
        finally:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            self.close_sockets()
        if self.guard is None:  # else the context is the whole worker's
            self._context.destroy(linger=100)
        self._inbox.close()

    def _turn(self) -> bool:
        now = now_ms()
        wait = max(0, self.next_wake(now) - now)
        with self._inbox.listening() as bell:
            ready = dict(self._poller.poll(wait if self._inbox.empty else 0))
        ready.pop(bell, None)
        now = now_ms()
        for item in self._inbox.take():
            if isinstance(item, Stop):
                return False
            self.on_item(item, now)
        if ready:
            self.on_ready(ready, now)
        self.on_due(now)
        if now >= self._next_beat:
            self._next_beat = Millis(now + millis(self.config.kv_beat_seconds))
            self.on_tick(now)
        return True


def roomy_context() -> zmq.Context[zmq.Socket[bytes]]:
    """For any number of links: each takes three sockets, and ZMQ allows 1,023 by default."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that never lingers, never reads oversized frames, never blocks for long."""
    from tandem.kvtransfer.handoff.messages import MAX_MESSAGE_BYTES

    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket
