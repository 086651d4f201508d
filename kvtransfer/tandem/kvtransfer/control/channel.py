"""Code shared by both ends of the control plane: the thread, its clock, beats and counters.

Waking another thread takes a tenth of a millisecond on an idle machine, once a hop in each
hand-off. So the transfer thread itself serves the sockets while it has nothing to do (``attend``),
and between its turns (``look``). It sends and receives without another thread. The control thread
takes over when the transfer thread has been busy for a while, so that beats are sent in time.
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
from tandem.kvtransfer.control.mail import Drop, FromPeer, Say, SetPeers, Stop, ToControl, ToMover
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
"""Frames that may wait for a peer; one more breaks the link, as a lost frame would."""
STOP_SECONDS = 5.0
STAND_BY_SECONDS = 0.1
"""Seconds that the transfer thread may be busy before the control thread serves the sockets. A
quarter of a beat's interval, if that is less."""


def now_ms() -> Millis:
    """Return this process's monotonic clock in milliseconds."""
    return Millis(time.monotonic_ns() // 1_000_000)


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
        offer: Callable[[FromPeer], bool] | None = None,
        guard: CurveGuard | None = None,
    ) -> None:
        """``deliver`` takes items that must not be lost, ``offer`` messages of peers. ``offer``
        returns False if too many wait."""
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
        """Sockets may have messages that they do not signal again: the last look found some."""
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
        """Lock of sockets and links; the thread that holds it serves them."""
        self._wanted = False
        """The transfer thread is about to attend."""
        self._attended_at = -math.inf
        """Time of its last turn, by ``time.monotonic``."""
        self._over = threading.Event()
        """Set once no thread serves the sockets."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread.start()

    def post(self, item: ToControl) -> None:
        """Queue an item for the control thread. Any thread may call this."""
        self._inbox.put(item)

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._inbox.put(Stop())
        self._attended_at = -math.inf  # a busy transfer thread is not waited for
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        elif self._thread.ident is None:
            self._end()

    # What an end does

    def on_ready(self, ready: dict[object, int], now: Millis) -> None:
        """Handle readable sockets."""
        raise NotImplementedError

    def on_item(self, item: Say | Drop | SetPeers, now: Millis) -> None:
        """Handle an item of the transfer thread or the engine's thread."""
        raise NotImplementedError

    def on_due(self, now: Millis) -> None:
        """Handle work that is due without a frame. Called every turn."""

    def on_tick(self, now: Millis, late: float = 0.0) -> None:
        """Send a due beat, and check for those that did not come. ``late`` is the seconds for
        which this thread stood still since the last one."""
        raise NotImplementedError

    def close_sockets(self) -> None:
        """Close the sockets at the thread's end."""
        raise NotImplementedError

    def next_wake(self) -> float:
        """Return when (in milliseconds) the thread must wake even if nothing arrives."""
        return self._pulse.next * 1000

    # What is the same

    def beat(self) -> Beat:
        """Return this process's beat."""
        board = self._board
        return Beat(board.engine_turns, board.transfers, board.has_work)

    def from_peer(self, said: FromPeer) -> bool:
        """Pass a message to the transfer thread; return False if it does not keep up."""
        if self._offer is not None:
            return self._offer(said)
        self._deliver(said)
        return True

    def garbage(self) -> None:
        """Count data that is not a frame."""
        self.metrics.garbage.labels("control").inc()

    # Whose turn it is

    def attend(
        self, mine: WakeQueue[Any], seconds: float | None, others: Sequence[int] = ()
    ) -> bool:
        """Serve the sockets in this thread's place until ``mine`` has an item, one of the
        ``others`` is readable, a frame has come or the seconds are over. Called by the transfer
        thread. Return False at once if the channel is closed."""
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
                # Twice, or sockets that never run dry would keep this thread from its own work.
                if mine.empty and self._serve(0) and mine.empty and self._serve(0):
                    return True
                rest = min(until, self.next_wake() / 1000) - time.monotonic()
                # Nothing is left by now: of what was, sockets would not say again that it came.
                if mine.empty and rest > 0 and not self._over.is_set():
                    ready = self._sleep((mine.fileno(), *others), rest)
                    # Else the engine's thread waits, a read has got on, or a deadline has passed,
                    # which goes first; of what came meanwhile sockets may not say so again.
                    if mine.empty and ready.isdisjoint(others) and time.monotonic() < until:
                        self._serve(0)
                    else:
                        self._more = True
        finally:
            self._attended_at = time.monotonic()
            self._lock.release()
        return not self._over.is_set()

    def nap(self, mine: WakeQueue[Any], seconds: float, others: Sequence[int] = ()) -> bool:
        """Run ``attend`` for a moment, of which there are thousands while bytes move: sockets
        are only polled. Return False at once if the channel is closed."""
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
        """Send what is queued and receive what has arrived, unless another thread does so. Called
        by the transfer thread between two pieces of its work."""
        if self._lock.acquire(blocking=False):
            try:
                # What is sent may swallow a socket's word of what has come.
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
        """Stop waking for a socket, if it was watched."""
        if socket in self._poller:
            self._poller.unregister(socket)
        self._watched = None

    def _descriptors(self) -> Sequence[int]:
        """Return descriptors of the sockets; none while the control thread serves them."""
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
        """Wait until a socket, the inbox or one of the others has something; return which of
        them have. Earlier messages must have been taken."""
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
        """Return whether the transfer thread serves the sockets, or did so recently."""
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
            if self.guard is None:  # else the context is the whole worker's
                self._context.destroy(linger=100)
            self._inbox.close()
        self.on_end()

    def _serve(self, milliseconds: int | None = None) -> bool:
        """Run one turn with the lock held: wait until something is due, at most ``milliseconds``,
        and do it. Return whether anything was done."""
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
        said = self._say_all()  # before sockets are asked: a peer waits for it
        if milliseconds is None:
            milliseconds = math.ceil(max(0.0, self.next_wake() - now_ms()))
        if milliseconds and not said and not self._over.is_set():
            with self._inbox.listening():
                ready = dict(self._poller.poll(milliseconds if self._inbox.empty else 0))
            said = self._say_all()
        else:  # who sleeps afterwards listens already
            ready = dict(self._poller.poll(0))
        if self._over.is_set():
            return False
        ready.pop(self._inbox.fileno(), None)
        now = now_ms()
        if ready:
            self.on_ready(ready, now)
        self.on_due(now)
        # By a finer clock than `now`: who woke for a beat would ask until its millisecond is over.
        late = self._pulse.late(time.monotonic())
        if late is not None:
            self.on_tick(now, late)
        return bool(said or ready) or late is not None

    def _say_all(self) -> bool:
        """Handle queued items up to a Stop; return whether there was any."""
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
