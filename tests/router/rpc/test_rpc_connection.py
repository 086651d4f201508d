"""A connection of gRPC alone, over no socket: what a client makes it keep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from tandem.router.held_bytes import HeldBytes
from tandem.router.rpc.call import Call
from tandem.router.rpc.http2 import Connection


class Owner:
    """A server that answers nothing."""

    max_message_bytes = 1_000
    max_header_bytes = 2_048
    max_headers = 16
    max_calls = 10
    header_seconds = write_seconds = 60.0

    def __init__(self) -> None:
        self.held = HeldBytes(10_000)

    def opened(self, _: Connection) -> bool:
        """There is room."""
        return True

    def closed(self, _: Connection) -> None:
        """Nobody counts."""

    def begin(self, call: Call) -> bool:
        """Too many run."""
        return False


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_ended = False
        self.is_read = True
        self.unsent = 0
        self.closed = asyncio.Event()

    def pause_reading(self) -> None:
        """Nothing more is taken from the client."""
        self.is_read = False

    def resume_reading(self) -> None:
        """It is again."""
        self.is_read = True

    def write(self, data: Any) -> None:
        """The client would hear it."""
        if self.is_ended:
            raise RuntimeError("nothing is written behind the end")
        self.written += data

    def write_eof(self) -> None:
        """The client hears nothing more."""
        self.is_ended = True

    def get_write_buffer_size(self) -> int:
        """All is heard at once, unless a test says otherwise."""
        return self.unsent

    def is_closing(self) -> bool:
        """Whether either end has closed it."""
        return self.is_closed

    def close(self) -> None:
        """In order."""
        self.is_closed = True
        self.closed.set()

    abort = close


HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "x"),
    (":path", "/tandem.v1.Inference/Generate"),
    ("content-type", "application/grpc"),
]


class Both:
    """A client and the connection that it speaks to."""

    def __init__(self, owner: Owner | None = None) -> None:
        self.wire = Wire()
        self.server = Connection(owner or Owner())
        self.server.connection_made(self.wire)
        self.client = H2Connection(H2Configuration(client_side=True))
        self.client.initiate_connection()

    def say(self) -> list[Any]:
        """What the client has to say, and what it hears then."""
        self.server.data_received(self.client.data_to_send())
        heard, self.wire.written = self.wire.written, b""
        return self.client.receive_data(heard)

    def ask(self, *more: tuple[str, str]) -> int:
        """Begin a call."""
        stream = self.client.get_next_available_stream_id()
        self.client.send_headers(stream, [*HEAD, *more], end_stream=True)
        return stream


@pytest.mark.parametrize("sizes", [(2**32 - 1,), (100, 5_000, 200, 2**32 - 1)])
async def test_the_table_of_headers_stays_small(sizes: tuple[int, ...]) -> None:
    """However large a one the client would keep; what it hears it understands."""
    both = Both()
    for size in sizes:
        both.client.update_settings({SettingCodes.HEADER_TABLE_SIZE: size})
    both.say()
    encoder = both.server.h2.encoder

    assert encoder.header_table_size == 4_096
    assert len(encoder.table_size_changes) <= 2
    both.say()  # the client heard that its sizes are taken
    stream = both.ask()
    (answer,) = [each for each in both.say() if getattr(each, "headers", None)]
    assert answer.stream_id == stream
    assert (b"grpc-status", b"8") in [(name, value) for name, value in answer.headers]


async def test_headers_are_bounded_as_set() -> None:
    """Beyond it the connection ends."""
    both = Both()
    both.ask(("a", "b" * 1_500))
    both.say()
    assert not both.wire.is_ended
    both.ask(("a", "b" * 2_500))
    both.say()

    assert both.wire.is_ended
