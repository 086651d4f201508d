"""A connection of gRPC: HTTP/2's frames to calls, within bounds.

``h2`` is the state machine of the protocol. What a client may take before anybody is known to be
behind it is bounded here: how long it may say nothing, how many calls run and are given up, what
waits to be written for it, and that what waits moves; how much of what it says is taken in a turn
of the loop, and how much it may say that is no call (``calm``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

import grpc
from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from tandem.router.closing import Closing
from tandem.router.held_bytes import HeldBytes
from tandem.router.rpc.call import Call
from tandem.router.rpc.calm import TURN, Calm
from tandem.router.rpc.frames import Frame, Frames, pong_to, room_of, takes_leave
from tandem.router.rpc.heads import BoundedDecoder, bound_table, headers_of, timeout_of

logger = logging.getLogger(__name__)

WINDOW = 1 << 20
"""Bytes of a request that may be under way."""
SPARE_RESETS = 100
"""Calls that a client may give up beyond those that it heard the end of."""
_MAX_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65_535
"""Of a connection: what it begins with, whatever the client says."""


class Owner(Protocol):
    """The server, as its connections see it."""

    max_message_bytes: int
    max_header_bytes: int
    max_headers: int
    """Of one call."""
    max_calls: int
    """Of one connection."""
    held: HeldBytes
    header_seconds: float
    write_seconds: float

    def opened(self, connection: Connection) -> bool:
        """Count it; False where it is one too many."""

    def closed(self, connection: Connection) -> None:
        """It is gone."""

    def begin(self, call: Call) -> bool:
        """Answer a call; False where the server takes none."""


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, owner: Owner) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.calls: dict[int, Call] = {}
        self.waiting: dict[Call, None] = {}
        self._frames = Frames(self.h2.max_inbound_frame_size)
        self.is_paused = False
        self._turn: asyncio.Handle | None = None
        self._is_behind = False
        """Frames are left for turns to come; nothing is read meanwhile."""
        self._made_room = False
        """The client did, for calls that wait."""
        self.granted = 0
        self.write_seconds = owner.write_seconds
        self._paused_at = self._paused_seconds = 0.0
        self._owner = owner
        self._num_heard = self._num_reset = 0
        self._last = 0
        self._is_leaving = self._is_left = False
        """Who takes leave: the server, the client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Greet the client, or turn it away."""
        self._transport = transport
        self.send: Callable[[bytes], None] = transport.write
        self._loop = asyncio.get_running_loop()
        self._calm = Calm(self._loop.time())
        self._closing = Closing(transport, self.write_seconds)
        if not self._owner.opened(self):
            transport.abort()
            return
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.h2.local_settings = Settings(  # h2's own way to begin with others than its own
            client=False,
            initial_values={
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
                SettingCodes.MAX_CONCURRENT_STREAMS: self._owner.max_calls,
                SettingCodes.MAX_HEADER_LIST_SIZE: self._owner.max_header_bytes,
            },
        )
        self.h2.decoder = BoundedDecoder(self._owner.max_headers, self._owner.max_header_bytes)
        self.h2.initiate_connection()
        self.flush()
        self._closing.arm(self._owner.header_seconds, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """All its calls are given up."""
        self._closing.lost()
        for call in list(self.calls.values()):
            call.lost()
        self._owner.closed(self)

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        if self._closing.has_begun:
            self._closing.heard(len(data))
            return
        self._frames.add(data)
        if not self._is_behind:
            self._take_turn()

    def _take_turn(self) -> None:
        """Take some of the frames that came: one read may bring thousands, and others wait."""
        self._turn = None
        if self.is_paused:
            self._is_behind = True
        if self.is_paused or self._closing.is_over():
            return
        room, others = TURN, []
        for frame in self._frames.split():
            room -= self._calm.heard(frame)
            if not self._is_done(frame):
                others.append(frame.whole)
            if room <= 0:
                break
        if not self._calm.is_kept(self._loop.time(), self._num_sent()):
            self._send_away()
            return
        if others and not self._hear(b"".join(others)):
            return
        if self._made_room:
            self._pump()
        self._shut_if_left()
        if self._closing.is_over():
            return
        was_behind, self._is_behind = self._is_behind, room <= 0
        if self._is_behind and not was_behind:
            self._transport.pause_reading()
        if self._is_behind or was_behind:
            self._go_on()

    def _go_on(self) -> None:
        """Have the next turn, or read on."""
        if self.is_paused or self._closing.is_over():
            return
        if not self._is_behind:
            self._transport.resume_reading()
        elif self._turn is None:
            self._turn = self._loop.call_soon(self._take_next_turn)

    def _take_next_turn(self) -> None:
        """Outside of ``data_received``, where the loop itself would end the connection."""
        try:
            self._take_turn()
        except Exception:
            logger.exception("a gRPC connection has ended unexpectedly")
            self.abort()

    def _hear(self, frames: bytes) -> bool:
        """What ``h2`` makes of them; False where the connection ends."""
        try:
            events = self.h2.receive_data(frames)
        except ProtocolError:
            self._close()
            return False
        bound_table(self.h2)
        if self.h2.state_machine.state is ConnectionState.CLOSED:  # the client said GOAWAY
            self._close()
            return False
        for event in events:
            if self._closing.is_over():
                return False
            self._handle(event)
        self.flush()
        return True

    def _pump(self) -> None:
        """Once a turn, however often the client says so: many calls may wait."""
        self._made_room = False
        for call in list(self.waiting):
            if self.h2.outbound_flow_control_window <= 0:
                break
            call.pump()

    def _num_sent(self) -> int:
        """Bytes of all answers."""
        return _FIRST_WINDOW + self.granted - self.h2.outbound_flow_control_window

    def pause_writing(self) -> None:
        """The client takes less than it is sent: nothing more is read of it, either."""
        self.is_paused = True
        self._paused_at = self._loop.time()
        self._transport.pause_reading()
        self._closing.watch()

    def resume_writing(self) -> None:
        """The client reads on."""
        if not self._closing.is_over():  # else the last words are waited for as well
            self._closing.disarm()
        self.is_paused = False
        self._paused_seconds += self._loop.time() - self._paused_at
        self._go_on()
        for call in self.calls.values():
            call.wake()

    def clock(self) -> float:
        """Seconds in which the client's frames were read: it stands still while it is paused."""
        now = self._paused_at if self.is_paused else self._loop.time()
        return now - self._paused_seconds

    def flush(self) -> None:
        """What ``h2`` has to say."""
        data = self.h2.data_to_send()
        if data:
            self._transport.write(data)

    def _ended(self, stream_id: int, call: Call) -> None:
        """Nobody answers the call any more."""
        call.over()
        if self.calls.pop(stream_id, None) is not None:
            self._num_heard += 1
        self._shut_if_left()

    def is_idle(self) -> bool:
        """Whether it could be asked to leave: it has no call, and has not ended yet."""
        return not self.calls and not self._closing.is_over()

    def is_lingering(self) -> bool:
        """Whether it has ended, and its client alone is waited for."""
        return self._closing.is_lingering()

    def leave(self) -> None:
        """Take no more calls, and close once those that run have ended."""
        if self._is_leaving or self._closing.is_over():
            return
        self._is_leaving = True
        # By hand: h2 takes a connection that has said GOAWAY for closed.
        body = self._last.to_bytes(4, "big") + bytes(4)
        self._transport.write(len(body).to_bytes(3, "big") + b"\x07" + bytes(5) + body)
        self._shut_if_left()

    def abort(self) -> None:
        """Be gone, whatever is unsent."""
        self._transport.abort()

    def _shut_if_left(self) -> None:
        """Nobody who has taken leave begins another call, or is answered one any more."""
        if (self._is_leaving or self._is_left) and not self.calls:
            self._closing.begin()

    def _is_done(self, frame: Frame) -> bool:
        """Whether it was one of the plainest, which is dealt with here."""
        pong = pong_to(frame)
        if pong:
            self._transport.write(pong)
            return True
        if takes_leave(frame):
            self._is_left = True  # not for h2: it would end the calls that run
            return True
        more, call = room_of(frame), self.calls.get(frame.stream_id)
        if frame.stream_id and call is None:
            return False
        window = self.h2 if call is None else call.stream
        if not 0 < more <= _MAX_WINDOW - window.outbound_flow_control_window:
            return False
        window.outbound_flow_control_window += more
        if call is None:
            self.granted += more
            self._made_room = True
        else:
            call.pump()
        return True

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReceived(stream_id=int() as stream_id):
                self._begin(stream_id, event)
            case DataReceived(stream_id=int() as stream_id):
                self._take(stream_id, event)
            case StreamEnded(stream_id=int() as stream_id):
                if stream_id in self.calls:
                    self.calls[stream_id].end_of_requests()
            case StreamReset(stream_id=int() as stream_id):
                self._give_up(stream_id)
            case WindowUpdated(stream_id=stream_id) if stream_id:
                if stream_id in self.calls:
                    self.calls[stream_id].pump()
            case WindowUpdated() | RemoteSettingsChanged():
                if not self.is_paused:
                    self._closing.disarm()
                self._made_room = True

    def _begin(self, stream_id: int, event: RequestReceived) -> None:
        self._last = stream_id
        stream = self.h2.streams.get(stream_id)
        if stream is None or stream.closed:  # by a frame that was read together with this one
            self._count_reset()
            return
        headers = headers_of(event.headers)
        seconds = timeout_of(headers)
        if self._is_leaving:
            self.h2.reset_stream(stream_id, error_code=ErrorCodes.REFUSED_STREAM)
            return
        if not headers.get("content-type", "").startswith("application/grpc"):
            self.h2.send_headers(stream_id, [(":status", "415")], end_stream=True)
            return
        call = self.calls[stream_id] = Call(
            self,
            stream_id,
            path=headers.get(":path", ""),
            metadata=headers,
            deadline=None if seconds is None else self._loop.time() + seconds,
            max_message_bytes=self._owner.max_message_bytes,
            held=self._owner.held,
        )
        if not self._owner.begin(call):
            call.finish(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls run")
            self.calls.pop(stream_id)
            return
        assert call.task is not None, "a call that has begun runs"
        call.task.add_done_callback(lambda _: self._ended(stream_id, call))

    def _take(self, stream_id: int, event: DataReceived) -> None:
        size = event.flow_controlled_length or 0
        call = self.calls.get(stream_id)
        if call is not None:
            call.feed(event.data or b"")
        if size and stream_id in self.h2.streams and not self.h2.streams[stream_id].closed:
            self.h2.acknowledge_received_data(size, stream_id)
        elif size:  # of a stream that is over: the connection's window is everybody's
            self.h2.increment_flow_control_window(size)

    def _give_up(self, stream_id: int) -> None:
        call = self.calls.pop(stream_id, None)
        if call is None:
            return
        call.lost()
        self._count_reset()

    def _count_reset(self) -> None:
        self._num_reset += 1
        if self._num_reset > SPARE_RESETS + self._num_heard:
            self._send_away()

    def _send_away(self) -> None:
        """Who asks for too much hears that."""
        self.h2.close_connection(error_code=ErrorCodes.ENHANCE_YOUR_CALM)
        self._close()

    def _close(self) -> None:
        """``h2`` takes nothing more: the last words, and no call says any after them."""
        self.flush()
        for call in list(self.calls.values()):
            call.lost()
        self._closing.begin()
