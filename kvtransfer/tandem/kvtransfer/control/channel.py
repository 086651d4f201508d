"""What both ends of the control plane share: the thread, its clock, its beats, its counters."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable

import zmq

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.mail import Drop, FromPeer, Say, SetPeers, Stop, ToControl, ToMover
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import HANDOFF_VERSION, MAX_MESSAGE_BYTES
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.progress import ProgressBoard
from tandem.link.curve import CurveGuard
from tandem.link.liveness import LinkTimes, Pulse
from tandem.link.session import Terms
from tandem.link.sockets import Context, Socket, open_socket, roomy
from tandem.link.wake_queue import WakeQueue
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import Beat

logger = logging.getLogger(__name__)

HIGH_WATER = 10_000
"""Frames that may wait for a peer; one more breaks the link, as a lost frame would."""
STOP_SECONDS = 5.0


def now_ms() -> Millis:
    """This process's monotonic clock."""
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
        """``deliver`` takes what must not be lost, ``offer`` what peers say: False where too much
        of it waits."""
        self.guard = guard
        self.config = config
        self.metrics = metrics
        self.problem: str | None = None
        self._board = board
        self._deliver = deliver
        self._offer = offer
        self._context = roomy() if guard is None else guard.context
        self._inbox: WakeQueue[ToControl] = WakeQueue()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.fileno(), zmq.POLLIN)
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

    def on_tick(self, now: Millis, late: float = 0.0) -> None:
        """A beat is due: send it, and judge those that did not come. ``late``: seconds that this
        thread stood still since the last one."""
        raise NotImplementedError

    def close_sockets(self) -> None:
        """The thread ends."""
        raise NotImplementedError

    def next_wake(self) -> float:
        """When (in milliseconds) the thread must wake though nothing came."""
        return self._pulse.next * 1000

    # What is the same

    def beat(self) -> Beat:
        """This process's beat."""
        board = self._board
        return Beat(board.engine_turns, board.transfers, board.has_work)

    def from_peer(self, said: FromPeer) -> bool:
        """For the transfer thread; False where it does not keep up."""
        if self._offer is not None:
            return self._offer(said)
        self._deliver(said)
        return True

    def garbage(self) -> None:
        """Something came that is no frame: counted, and that is all."""
        self.metrics.garbage.labels("control").inc()

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
        wait = math.ceil(max(0.0, self.next_wake() - now))
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
        late = self._pulse.late(now / 1000)
        if late is not None:
            self.on_tick(now, late)
        return True


def control_socket(context: Context, kind: int) -> Socket:
    """A socket whose connections are looked after by the kernel, too."""
    socket = open_socket(
        context, kind, max_bytes=MAX_MESSAGE_BYTES, unsent=HIGH_WATER, unread=HIGH_WATER
    )
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket
