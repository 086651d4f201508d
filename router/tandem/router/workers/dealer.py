"""One ZMQ DEALER socket inside an asyncio loop.

It reads from the socket's descriptor: ``zmq.asyncio`` makes an expensive future per message. Used
in the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.link.curve import call_with
from tandem.link.sockets import HANDSHAKE_FAILED, MAX_FRAME_BYTES, Context, Socket, open_socket
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.keys import CallKeys, KeyRing

logger = logging.getLogger(__name__)

_BATCH = 64
"""Messages read before other tasks of the loop run."""
_BATCH_BYTES = 1 << 18
"""Bytes of such messages, without the last one's."""
_SEND_QUEUE = 10_000
_CONNECT_MS = 3_000
_HANDSHAKE_MS = 5_000
_RETRY_MS = 100
_RETRY_MAX_MS = 2_000
"""Maximum milliseconds until a socket is made again."""
_CONNECT_AGAIN_MAX_MS = 500
"""Maximum milliseconds until ZMQ connects again."""
_WORKERS = ("decode", "prefill")


class Dealer:
    """Socket to one address. ZMQ reconnects it, and resolves the name again."""

    def __init__(
        self,
        context: Context,
        address: str,
        *,
        received: Callable[[list[bytes]], None],
        connected: Callable[[], None],
        disconnected: Callable[[], None],
        curve: KeyRing | None = None,
    ) -> None:
        self._context = context
        self._address = address
        self._received = received
        self._connected = connected
        self._disconnected = disconnected
        self._curve = curve
        self._failures = 0
        """Sockets with a failed handshake: each tries the next key."""
        self._refusals = 0
        """Failed handshakes since the last success."""
        self._next_key: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        """Timer while there is no socket."""
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._open()

    def _open(self) -> None:
        try:
            self._connect()
        except (zmq.ZMQError, InvalidParameter) as error:
            logger.error("no socket for %s, another try soon: %s", self._address, error)
            self.close()
            self._failures += 1  # the key may be unusable
            self._retry = self._loop.call_later(_RETRY_MAX_MS / 1000, self.reopen)

    def _connect(self) -> None:
        """Open the socket.

        Raises ZMQError without room or for an invalid key, InvalidParameter without keys.
        """
        socket = self._socket = open_socket(
            self._context, zmq.DEALER, max_bytes=MAX_FRAME_BYTES, unsent=_SEND_QUEUE, unread=0
        )
        socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue for a missing process
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _CONNECT_AGAIN_MAX_MS)
        socket.setsockopt(zmq.IPV6, 1)
        if self._curve is not None:
            self._authenticate(socket, self._curve)
        monitor = self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._loop.add_reader(socket.FD, self._on_readable)
        self._loop.add_reader(monitor.FD, self._on_monitor)
        socket.connect(f"tcp://{self._address}")
        self._loop.call_soon(self._on_monitor)

    def _authenticate(self, socket: Socket, ring: KeyRing) -> None:
        keys = ring.call(_WORKERS, self._failures)
        if keys is None:
            logger.error("no public key of a worker is known; %s cannot be reached", self._address)
            keys = CallKeys(ring.public, ring.public, ring.secret)
        call_with(keys, socket)

    @property
    def is_refused(self) -> bool:
        """Return whether no known key of workers led to a handshake since the last success."""
        if self._curve is None or not self._refusals:
            return False
        return self._refusals > max(1, sum(len(self._curve.public_keys(r)) for r in _WORKERS))

    def _try_next_key_soon(self) -> None:
        """Schedule the next key, once per socket: ZMQ's own retries must not skip keys."""
        if self._next_key is None:
            self._failures += 1
            before, self._refusals = self.is_refused, self._refusals + 1
            if self.is_refused and not before:
                logger.warning(
                    "%s refuses this router's CURVE key, or has another key than configured",
                    self._address,
                )
            pause_ms = min(_RETRY_MS * self._failures, _RETRY_MAX_MS)
            self._next_key = self._loop.call_later(pause_ms / 1000, self.reopen)

    def reopen(self) -> None:
        """Drop queued frames and reconnect, without a callback."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close the socket. May be called twice."""
        for timer in (self._again, self._next_key, self._retry):
            if timer is not None:
                timer.cancel()
        self._again = self._next_key = self._retry = None
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        if monitor is not None:
            self._loop.remove_reader(monitor.FD)
        if socket is not None:
            self._loop.remove_reader(socket.FD)
            socket.disable_monitor()
            socket.close(0)
        if monitor is not None:
            monitor.close(0)

    def send(self, header: bytes, payload: bytes) -> bool:
        """Queue one frame; return False without a connection or room."""
        socket = self._socket
        if socket is None:
            return False
        sent = _try_send(socket, header, payload)
        if not sent and socket.getsockopt(zmq.EVENTS):
            # A new pipe is seen only after a poll.
            sent = _try_send(socket, header, payload)
        self._look_again(socket)
        return sent

    def _look_again(self, socket: Socket) -> None:
        """Poll again: a send may swallow the signal of received frames."""
        if self._again is None and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._again = self._loop.call_soon(self._take_turn)

    def _on_readable(self) -> None:
        if self._again is None:  # else the next turn is due already
            self._take_turn()

    def _take_turn(self) -> None:
        self._again = None
        socket = self._socket
        if socket is not None and self._drain(socket, _BATCH):
            self._look_again(socket)

    def _drain(self, socket: Socket, limit: int) -> bool:
        """Deliver up to ``limit`` frames, fewer if large; return whether there may be more."""
        left = _BATCH_BYTES
        for _ in range(limit):
            if socket.closed:
                return False
            if left <= 0:
                break
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            left -= sum(map(len, parts))
            self._received(parts)
        return not socket.closed

    def _on_monitor(self) -> None:
        socket, monitor = self._socket, self._monitor
        if socket is None or monitor is None:
            return
        while not monitor.closed:
            try:
                event = recv_monitor_message(monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._refusals = 0
                if self._next_key is not None:  # ZMQ's own retry succeeded
                    self._next_key.cancel()
                    self._next_key = None
                self._connected()
            elif event["event"] & HANDSHAKE_FAILED:
                self._try_next_key_soon()
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                while self._drain(socket, _BATCH):
                    pass  # earlier frames count
                if not monitor.closed:
                    self._disconnected()


def _try_send(socket: Socket, header: bytes, payload: bytes) -> bool:
    try:
        socket.send_multipart((header, payload), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
