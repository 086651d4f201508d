"""A client of gRPC by hand, which sends what it likes over HTTP/2, and its messages."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes, Settings

from tandem.router.rpc import tandem_pb2 as pb

GENERATE = "/tandem.v1.Inference/Generate"


class RawClient:
    """One connection; every event is kept."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        """``receive_buffer`` is the bytes that the kernel may hold unread; 0 leaves it to it."""
        self.socket = socket.socket()
        self.socket.settimeout(10)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.events: list[Event] = []
        self._holds_back = False

    def greet(self, **settings: int) -> RawClient:
        """Begin to speak."""
        initial = {SettingCodes[name]: value for name, value in settings.items()}
        self.h2.local_settings = Settings(client=True, initial_values=initial)
        self.h2.initiate_connection()
        self.flush()
        return self

    def flush(self) -> None:
        """Send what is to be sent."""
        if not self._holds_back:
            self.socket.sendall(self.h2.data_to_send())

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is said meanwhile goes in one piece, so that the server reads it in one."""
        self._holds_back = True
        yield
        self._holds_back = False
        self.flush()

    def ask(self, body: bytes, path: str = GENERATE, *, is_all: bool = True, **headers: str) -> int:
        """Begin a call; its stream. More may follow of a body that is not all."""
        stream = self.h2.get_next_available_stream_id()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"content-type": "application/grpc", **named}
        head = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", **named}
        self.h2.send_headers(stream, list(head.items()))
        for at in range(0, len(body), 16_384):
            self.h2.send_data(stream, body[at : at + 16_384])
        if is_all:
            self.h2.end_stream(stream)
        self.flush()
        return stream

    def until(self, done: Callable[[Event], bool], *, acknowledge: bool = True) -> Event | None:
        """Read up to an event; None at the end of the connection."""
        while True:
            for event in self.events:
                if done(event):
                    return event
            try:
                data = self.socket.recv(65_536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            for event in self.h2.receive_data(data):
                self.events.append(event)
                if acknowledge and isinstance(event, DataReceived):
                    assert event.flow_controlled_length is not None
                    self.h2.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id or 0
                    )
            try:
                self.flush()
            except (ConnectionResetError, BrokenPipeError):
                continue  # what came before the end may still be read, and then the end is

    def status(self, stream: int) -> tuple[str, str]:
        """The status and words of a call, when it has ended."""
        kinds = (TrailersReceived, ResponseReceived)

        def is_last(event: Event) -> bool:
            if not isinstance(event, kinds) or event.stream_id != stream:
                return False
            headers: Any = event.headers or ()
            return "grpc-status" in dict(headers)

        found: Any = self.until(is_last)
        assert found is not None
        headers = dict(found.headers)
        return headers["grpc-status"], headers.get("grpc-message", "")

    def data(self, stream: int) -> bytes:
        """What came of a stream so far."""
        got = (each for each in self.events if isinstance(each, DataReceived))
        return b"".join(each.data or b"" for each in got if each.stream_id == stream)


def framed(message: bytes, compressed: int = 0) -> bytes:
    """A message of gRPC."""
    return struct.pack(">BI", compressed, len(message)) + message


def asked(**fields: Any) -> bytes:
    """A framed request of Generate."""
    return framed(pb.GenerateRequest(prompt="Hi", **fields).SerializeToString())


def texts(data: bytes) -> str:
    """What messages of Generate say."""
    said = ""
    while data:
        (size,) = struct.unpack_from(">xI", data)
        message = pb.GenerateResponse.FromString(data[5 : 5 + size])
        said += "".join(each.text for each in message.choices)
        data = data[5 + size :]
    return said


def is_end(event: Event) -> bool:
    """Whether a stream has ended."""
    return isinstance(event, StreamEnded | StreamReset)
