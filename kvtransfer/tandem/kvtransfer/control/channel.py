"""Both ends of the control plane: the thread, its clock, beats and counters.

Waking another thread is slow on an idle machine, so the transfer thread serves the sockets itself
while idle (``attend``) and between its turns (``look``). If it is busy for long, the control thread
takes over.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.mail import (
    Drop,
    FromPeer,
    SendMessage,
    SetPeers,
    Stop,
    ToControl,
    ToMover,
)
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import MAX_MESSAGE_BYTES
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.link.curve import CurveGuard
from tandem.link.liveness import LinkTimes, Pulse
from tandem.link.naps import sleep_on
from tandem.link.session import Terms
from tandem.link.sockets import Context, Socket, open_socket, roomy
from tandem.link.wake_queue import WakeQueue
from tandem.protocol.card import HANDOFF_VERSION
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import Beat

logger = logging.getLogger(__name__)

HIGH_WATER = 10_000
"""Frames that may wait for a peer; one more breaks the link."""
STOP_SECONDS = 5.0
STAND_BY_SECONDS = 0.1
"""Seconds that the transfer thread may be busy before the control thread serves the sockets; at
most a quarter of a beat's interval."""


def now_ms() -> Millis:
    """Return this process's monotonic clock in milliseconds."""
    return Millis(time.monotonic_ns() // 1_000_000)


class Channel:
    """Control thread: sockets and beats."""

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
        offer: Callable[[FromPeer], bool] | None = None,
        guard: CurveGuard | None = None,
    ) -> None:
        """``deliver`` takes items that must not be lost, ``offer`` messages of peers; it returns
        False if too many wait."""
        self.guard = guard
        self.on_end: Callable[[], None] = lambda: None
        """Called by the control thread when it ends; set before ``start``."""
        self.config = config
        self.metrics = metrics
        self.problem: str | None = None
        self._board = board
        self._deliver = deliver
        self._offer = offer
        self._context = roomy() if guard is None else guard.context
        self._inbox: WakeQueue[ToControl] = WakeQueue()
        self._poller = zmq.Poller()
        self._watched: Sequence[int] | None = None
        """Descriptors of the poller's sockets; None until they are read."""
        self.watch(self._inbox.fileno())
        self._more = False
        """Whether sockets may have messages that they do not signal again."""
        times = LinkTimes(
            beat_interval=config.kv_beat_seconds,
            beat_timeout=config.kv_beat_timeout,
            stall_timeout=config.kv_stall_seconds,
            greet_timeout=config.kv_connect_seconds,
        )
        self.terms = Terms(
            incarnation,
            "version of the hand-off",
            HANDOFF_VERSION,
            times,
            fingerprint=fingerprint,
            secret=config.kv_secret,
        )
        self._pulse = Pulse(config.kv_beat_seconds)
        self._stand_by_seconds = min(STAND_BY_SECONDS, config.kv_beat_seconds / 4)
        self._lock = threading.Lock()
        """Lock of sockets and links; its holder serves them."""
        self._wanted = False
        """Whether the transfer thread is about to attend."""
        self._attended_at = -math.inf
        """Time of its last turn, by ``time.monotonic``."""
        self._over = threading.Event()
        """Set once no thread serves the sockets."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, item: ToControl) -> None:
        """Queue an item for the control thread. Callable from any thread."""
        self._inbox.put(item)

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._inbox.put(Stop())
        self._attended_at = -math.inf  # a busy transfer thread is not waited for
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        elif self._thread.ident is None:
            self._end()

    # Methods of an end.

    def on_ready(self, ready: dict[object, int], now: Millis) -> None:
        raise NotImplementedError

    def on_item(self, item: SendMessage | Drop | SetPeers, now: Millis) -> None:
        raise NotImplementedError

    def on_due(self, now: Millis) -> None:
        """Handle work that is due without a frame; called every turn."""

    def on_tick(self, now: Millis, late: float = 0.0) -> None:
        """Send a due beat, and check for missing ones. ``late`` is the seconds for which this
        thread stood still."""
        raise NotImplementedError

    def close_sockets(self) -> None:
        raise NotImplementedError

    def next_wake(self) -> float:
        """Return when (in milliseconds) the thread must wake even if nothing arrives."""
        return self._pulse.next * 1000

    # Methods that both ends share.

    def beat(self) -> Beat:
        board = self._board
        return Beat(board.engine_turns, board.transfers, board.has_work)

    def from_peer(self, received: FromPeer) -> bool:
        """Pass a message to the transfer thread; return False if it does not keep up."""
        if self._offer is not None:
            return self._offer(received)
        self._deliver(received)
        return True

    def garbage(self) -> None:
        self.metrics.garbage.labels("control").inc()

    # Turns of the threads.

    def attend(
        self, mine: WakeQueue[Any], seconds: float | None, others: Sequence[int] = ()
    ) -> bool:
        """Serve the sockets in the transfer thread until ``mine`` has an item, one of ``others`` is
        readable, a frame has come or ``seconds`` are over. Return False at once if the channel is
        closed."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        if not self._lock.acquire(blocking=False):
            self._wanted = True
            self._inbox.wake()  # the control thread sleeps with it
            self._lock.acquire()
            self._wanted = False
        try:
            if self._over.is_set():
                return False
            with mine.listening(), self._inbox.listening():
                # At most twice, so that busy sockets do not keep this thread from its own work.
                if mine.empty and self._serve(0) and mine.empty and self._serve(0):
                    return True
                rest = min(until, self.next_wake() / 1000) - time.monotonic()
                # The sockets must be empty here: they do not signal earlier messages again.
                if mine.empty and rest > 0 and not self._over.is_set():
                    ready = self._sleep((mine.fileno(), *others), rest)
                    # Otherwise the engine's thread, a read or a deadline goes first.
                    if mine.empty and ready.isdisjoint(others) and time.monotonic() < until:
                        self._serve(0)
                    else:
                        self._more = True
        finally:
            self._attended_at = time.monotonic()
            self._lock.release()
        return not self._over.is_set()

    def nap(self, mine: WakeQueue[Any], seconds: float, others: Sequence[int] = ()) -> bool:
        """Run ``attend`` for a moment; sockets are only polled. Return False at once if the channel
        is closed."""
        self._attended_at = time.monotonic()
        if self._over.is_set():
            return False
        with mine.listening():
            own = self._descriptors()
            stirs = mine.empty and sleep_on((mine.fileno(), *others, *own), seconds)
        due = time.monotonic() >= self._pulse.next
        if mine.empty and (stirs or due or self._more or not self._inbox.empty):
            self.look()
        return True

    def look(self) -> None:
        """Send and receive queued messages, unless another thread does so. For the transfer
        thread."""
        if self._lock.acquire(blocking=False):
            try:
                if self._serve(0):
                    self._serve(0)
            finally:
                self._attended_at = time.monotonic()
                self._lock.release()

    def watch(self, socket: Socket | int) -> None:
        """Let threads wake for a socket, or a descriptor."""
        self._poller.register(socket, zmq.POLLIN)
        self._watched = None

    def unwatch(self, socket: Socket) -> None:
        if socket in self._poller:
            self._poller.unregister(socket)
        self._watched = None

    def _descriptors(self) -> Sequence[int]:
        found = self._watched
        if found is not None:
            return found
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            mine = [each for each, _ in self._poller.sockets]
            found = tuple(each if isinstance(each, int) else int(each.FD) for each in mine)
            self._watched = found
        finally:
            self._lock.release()
        return found

    def _sleep(self, others: tuple[int, ...], seconds: float) -> set[object]:
        """Wait until a socket, the inbox or one of ``others`` is readable; return these. Earlier
        messages must have been read."""
        for each in others:
            self._poller.register(each, zmq.POLLIN)
        try:
            return {each for each, _ in self._poller.poll(math.ceil(seconds * 1000))}
        finally:
            for each in others:
                self._poller.unregister(each)

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self._serve()
            while self._stands_by() and not self._over.wait(self._stand_by_seconds):
                pass
        self._end()

    def _stands_by(self) -> bool:
        if self._wanted:
            return True
        if self._lock.locked():
            return True
        away = time.monotonic() - self._attended_at
        return away < self._stand_by_seconds

    def _end(self) -> None:
        with self._lock:
            with contextlib.suppress(Exception):
                self.close_sockets()
            if self.guard is None:  # else the context is shared by the worker
                self._context.destroy(linger=100)
            self._inbox.close()
        self.on_end()

    def _serve(self, milliseconds: int | None = None) -> bool:
        """Run one turn with the lock held: wait at most ``milliseconds`` and do what is due. Return
        whether anything was done."""
        if self._over.is_set():
            return False
        try:
            self._more = self._turn(milliseconds)
        except Exception as error:
            logger.exception("the control thread ends")
            self.problem = f"the KV control thread ended: {error}"
            self._over.set()
            return False
        return self._more

    def _turn(self, milliseconds: int | None = None) -> bool:
        sent = self._send_all()  # first, as a peer waits for it
        if milliseconds is None:
            milliseconds = math.ceil(max(0.0, self.next_wake() - now_ms()))
        if milliseconds and not sent and not self._over.is_set():
            with self._inbox.listening():
                ready = dict(self._poller.poll(milliseconds if self._inbox.empty else 0))
            sent = self._send_all()
        else:  # wakes are enabled for a later sleep
            ready = dict(self._poller.poll(0))
        if self._over.is_set():
            return False
        ready.pop(self._inbox.fileno(), None)
        now = now_ms()
        if ready:
            self.on_ready(ready, now)
        self.on_due(now)
        # A finer clock than `now`, which would be late by up to a millisecond.
        late = self._pulse.late(time.monotonic())
        if late is not None:
            self.on_tick(now, late)
        return bool(sent or ready) or late is not None

    def _send_all(self) -> bool:
        items, now = self._inbox.take(), now_ms()
        for item in items:
            if isinstance(item, Stop):
                self._over.set()
                break
            self.on_item(item, now)
        return bool(items)


def control_socket(context: Context, kind: int) -> Socket:
    """Open a socket with TCP keepalive."""
    socket = open_socket(
        context, kind, max_bytes=MAX_MESSAGE_BYTES, unsent=HIGH_WATER, unread=HIGH_WATER
    )
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket
