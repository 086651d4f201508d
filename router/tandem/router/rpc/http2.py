"""A connection of gRPC: HTTP/2's frames to calls, within bounds.

``h2`` is the state machine of the protocol. What a client may take before anybody is known to be
behind it is bounded here: how long it may say nothing, how many calls run and are given up, what
waits to be written for it, and that what waits moves.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
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

from tandem.router.rpc.call import MIN_DRAINED, Call, Held
from tandem.router.rpc.frames import GOAWAY, PING, WINDOW_UPDATE, Frame, Frames

WINDOW = 1 << 20
"""Bytes of a request that may be under way."""
SPARE_RESETS = 100
"""Calls that a client may give up beyond those that it heard the end of."""
_TABLE_BYTES = 4_096
"""Of headers said before, which later ones name by their number: what HTTP/2 begins with."""
_HEAD_BYTES = 9
_PING_BYTES = _HEAD_BYTES + 8
_PONG = b"\0\0\x08\x06\x01\0\0\0\0"
_MIN_GOAWAY_BYTES = _HEAD_BYTES + 8
_WINDOW_UPDATE_BYTES = _HEAD_BYTES + 4
_MAX_WINDOW = 2**31 - 1
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class Owner(Protocol):
    """The server, as its connections see it."""

    max_message_bytes: int
    max_header_bytes: int
    max_calls: int
    """Of one connection."""
    held: Held
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
        self._frames = Frames(self.h2.max_inbound_frame_size)
        self.is_paused = False
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
        self._timer: asyncio.TimerHandle | None = None
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
        self.h2.decoder.max_header_list_size = self._owner.max_header_bytes
        self.h2.initiate_connection()
        self.flush()
        self._timer = self._loop.call_later(self._owner.header_seconds, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """All its calls are given up."""
        self._disarm()
        for call in list(self.calls.values()):
            call.lost()
        self._owner.closed(self)

    def data_received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        frames = self._frames.split(data)
        rest = b"".join(each.whole for each in frames if not self._is_done(each))
        if not rest:
            self._shut_if_left()
            return
        try:
            events = self.h2.receive_data(rest)
        except ProtocolError:
            self._close()
            return
        self._bound_table()
        if self.h2.state_machine.state is ConnectionState.CLOSED:  # the client said GOAWAY
            self._close()
            return
        for event in events:
            if self._transport.is_closing():
                return
            self._handle(event)
        self.flush()
        self._shut_if_left()

    def pause_writing(self) -> None:
        """The client takes less than it is sent: nothing more is read of it, either."""
        self.is_paused = True
        self._paused_at = self._loop.time()
        self._transport.pause_reading()
        self._watch()

    def resume_writing(self) -> None:
        """The client reads on."""
        if not self._transport.is_closing():  # else the last words are waited for as well
            self._disarm()
        self.is_paused = False
        self._paused_seconds += self._loop.time() - self._paused_at
        self._transport.resume_reading()
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
        return not self.calls and not self._transport.is_closing()

    def leave(self) -> None:
        """Take no more calls, and close once those that run have ended."""
        if self._is_leaving:
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
            self._shut()

    def _bound_table(self) -> None:
        """The client says how large a table of headers it keeps; each answer would look through
        all of it here."""
        encoder = self.h2.encoder
        if encoder.header_table_size > _TABLE_BYTES:
            encoder.header_table_size = _TABLE_BYTES
        changes = encoder.table_size_changes
        if len(changes) > 2:  # that are to be told: the smallest and the last say all
            changes[:] = min(changes), changes[-1]

    def _is_done(self, frame: Frame) -> bool:
        """Whether it was one of the plainest, which is dealt with here."""
        whole = frame.whole
        if not frame.is_plain:
            return False
        if frame.kind == PING and len(whole) == _PING_BYTES and not frame.flags | frame.stream_id:
            self._transport.write(_PONG + whole[_HEAD_BYTES:])
            return True
        if (
            frame.kind == GOAWAY
            and not frame.stream_id
            and len(whole) >= _MIN_GOAWAY_BYTES
            and not any(whole[_HEAD_BYTES + 4 : _MIN_GOAWAY_BYTES])
        ):
            self._is_left = True  # not for h2: it would end the calls that run
            return True
        if frame.kind != WINDOW_UPDATE or len(whole) != _WINDOW_UPDATE_BYTES:
            return False
        more = int.from_bytes(whole[_HEAD_BYTES:], "big") & _MAX_WINDOW
        call = self.calls.get(frame.stream_id)
        if frame.stream_id and call is None:
            return False
        window = self.h2 if call is None else call.stream
        if not 0 < more <= _MAX_WINDOW - window.outbound_flow_control_window:
            return False
        window.outbound_flow_control_window += more
        if call is None:
            self.granted += more
        for each in self.calls.values() if call is None else (call,):
            each.pump()
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
                    self._disarm()
                for call in self.calls.values():
                    call.pump()

    def _begin(self, stream_id: int, event: RequestReceived) -> None:
        self._last = stream_id
        stream = self.h2.streams.get(stream_id)
        if stream is None or stream.closed:  # by a frame that was read together with this one
            self._count_reset()
            return
        headers = {_text(name): _text(value) for name, value in event.headers or ()}
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
            deadline=self._deadline(headers),
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
            self.h2.close_connection(error_code=ErrorCodes.ENHANCE_YOUR_CALM)
            self._close()

    def _close(self) -> None:
        """``h2`` takes nothing more: the last words, and no call says any after them."""
        self.flush()
        for call in list(self.calls.values()):
            call.lost()
        self._shut()

    def _shut(self) -> None:
        """Close when what is written has gone, or no longer moves."""
        if not self._transport.is_closing():
            self._transport.close()
            self._watch()

    def _deadline(self, headers: Mapping[str, str]) -> float | None:
        found = _TIMEOUT.fullmatch(headers.get("grpc-timeout", ""))
        return found and self._loop.time() + int(found[1]) * _UNITS[found[2]]

    def _watch(self) -> None:
        """What is written is to move from now on, in each period."""
        self._unsent = self._transport.get_write_buffer_size()
        self._arm(self.write_seconds, self._check_drained)

    def _check_drained(self) -> None:
        left = self._transport.get_write_buffer_size()
        if self._unsent - left < min(MIN_DRAINED, self._unsent):
            self._transport.abort()
            return
        self._watch()

    def _arm(self, seconds: float, late: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
