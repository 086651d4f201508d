"""A connection of HTTP alone, over no socket: what it takes of a client, and tells the requests."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from tests.router.app.wire import Wire
from uvicorn.server import ServerState

from tandem.router.http import closing
from tandem.router.http.closing import Closing
from tandem.router.http.guard import SPARE_CHUNKS, GuardedProtocol, guarded
from tandem.router.http.protocol import ConnectionLimits

CHUNKED = b"POST /read HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"POST /held HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx"


class App:
    """Reads requests, or does not; answers, or waits until it may."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.said: list[tuple[str, str]] = []
        """What requests heard last, by their paths."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/read":
            while (message := await receive()).get("more_body"):
                pass
            self.said.append((path, message["type"]))
        elif path == "/leaves":
            await receive()
            self.said.append((path, (await receive())["type"]))
        elif path == "/held":
            await self.go.wait()
        else:
            self.said.append((path, ""))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if path == "/begins":
            await self.go.wait()
        await send({"type": "http.response.body", "body": b"ok"})


class Connection:
    def __init__(self, **limits: Any) -> None:
        self.app, self.wire = App(), Wire()
        config = uvicorn.Config(
            self.app, lifespan="off", interface="asgi3", ws="none", log_config=None
        )
        config.load()
        self.protocol: GuardedProtocol = guarded(ConnectionLimits(**limits))(
            config=config, server_state=ServerState(), app_state={}
        )
        self.protocol.connection_made(self.wire)

    async def says(self, data: bytes) -> None:
        self.protocol.data_received(data)
        for _ in range(10):
            await asyncio.sleep(0)

    def leaves(self, error: Exception | None = None) -> None:
        self.wire.close()
        self.protocol.connection_lost(error)


@pytest.fixture
async def client() -> AsyncIterator[Connection]:
    made = Connection()
    yield made
    if not made.wire.is_closed:
        made.leaves()
    await asyncio.sleep(0)


@pytest.mark.parametrize("path", [b"/now", b"/read"])
async def test_a_body_has_few_small_chunks(client: Connection, path: bytes) -> None:
    """Each costs the loop a call, whether or not anybody reads it: 42,000 came in one read."""
    await client.says(CHUNKED.replace(b"/read", path))
    answers = client.wire.written.count(b"HTTP/1.1 ")
    await client.says(b"1\r\nx\r\n" * 40_000)
    assert client.wire.is_ended
    assert client.wire.written.count(b"HTTP/1.1 400 ") == 1 - answers
    assert client.protocol._num_parts < 2 * SPARE_CHUNKS


async def test_a_body_has_any_number_of_large_chunks(client: Connection) -> None:
    """What an encoder writes a value at a time is joined by most; 64 bytes are enough."""
    await client.says(CHUNKED)
    await client.says(b"".join(b"40\r\n%b\r\n" % (b"x" * 64) for _ in range(4 * SPARE_CHUNKS)))
    await client.says(b"0\r\n\r\n")
    assert client.wire.written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert not client.wire.is_ended


async def test_small_chunks_of_requests_that_wait_count_together(client: Connection) -> None:
    """Else a client had as many for each of them."""
    await client.says(SIZED)
    for _ in range(3):
        await client.says(CHUNKED + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n")
    assert client.wire.is_ended


async def test_what_follows_the_end_is_not_parsed(client: Connection) -> None:
    """It goes nowhere, and its end is no request's."""
    await client.says(CHUNKED + b"no size\r\n")
    assert client.app.said == [("/read", "http.disconnect")]
    await client.says(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.wire.written.count(b"HTTP/1.1 ") == 1
    assert not client.wire.is_closed


async def test_a_whole_request_is_answered_and_the_end_waits_for_the_client(
    client: Connection,
) -> None:
    """Who says more behind its last request would lose the answer, too."""
    await client.says(b"GET /now HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert client.wire.written.endswith(b"\r\n\r\nok")
    assert client.wire.is_ended
    await client.says(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert not client.wire.is_closed
    assert client.app.said == [("/now", "")]


async def test_a_request_that_comes_as_the_connection_ends_does_not_begin(
    client: Connection,
) -> None:
    """Nobody would hear its answer; its client sees the end, and asks again elsewhere."""
    await client.says(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.protocol.timeout_keep_alive_handler()
    await client.says(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.app.said == [("/now", "")]
    assert client.wire.is_ended
    assert not client.wire.is_closed


async def test_who_owes_more_than_a_body_may_have_is_left() -> None:
    client = Connection(unwanted_bytes=100_000)
    await client.says(CHUNKED + b"no size\r\n")
    await client.says(b"x" * 100_000)
    assert not client.wire.is_closed
    await client.says(b"x")
    assert client.wire.is_closed
    client.leaves()


async def test_garbage_behind_a_request_is_no_answer_to_it(client: Connection) -> None:
    """Its own was not given, and is not any more."""
    await client.says(SIZED)
    await client.says(b"no request\r\n\r\n")
    client.app.go.set()
    await client.says(b"")
    assert client.wire.is_ended
    assert client.wire.written == b""


async def test_headers_that_are_held_go_nowhere_behind_the_end(client: Connection) -> None:
    """An answer that began in the same turn of the loop."""
    problems: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, problem: problems.append(problem))
    client.protocol.data_received(b"GET /begins HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.sleep(0)
    assert client.protocol.cycle.response_started
    await client.says(b"no request\r\n\r\n")
    assert client.wire.is_ended
    assert not problems


async def test_an_empty_line_behind_a_request_is_no_head() -> None:
    """Old clients send one; the answer goes on for as long as it takes."""
    client = Connection(head_seconds=0.02)
    await client.says(SIZED)
    await client.says(b"\r\n")
    await asyncio.sleep(0.2)
    assert not client.wire.is_closed
    client.app.go.set()
    await client.says(b"")
    assert client.wire.written.startswith(b"HTTP/1.1 200 OK\r\n")
    client.leaves()


async def test_the_answer_that_runs_hears_that_its_client_left(client: Connection) -> None:
    """Not the last request alone that came; and what waited does not begin."""
    await client.says(b"GET /leaves HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await client.says(b"GET /read HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.wire.is_read  # else nobody would hear it leave
    client.leaves()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.app.said == [("/leaves", "http.disconnect")]
    assert not client.protocol.pipeline


async def test_who_has_many_requests_wait_is_not_listened_to(client: Connection) -> None:
    for _ in range(9):
        await client.says(SIZED)
    assert client.wire.is_read
    await client.says(SIZED)
    assert not client.wire.is_read


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
async def test_nothing_is_left_of_a_connection(error: Exception | None) -> None:
    """Neither a timer nor a circle keeps it when it is lost."""
    client = Connection()
    await client.says(b"GET /now HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.protocol.idle
    client.leaves(error)
    await asyncio.sleep(0)
    left = weakref.ref(client.protocol)
    gc.disable()
    try:
        del client
        assert left() is None
    finally:
        gc.enable()


async def test_who_owes_something_may_be_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no longer than others, then."""
    monkeypatch.setattr(closing, "LINGER_SECONDS", 0.01)
    wire = Wire()
    end = Closing(wire, 60.0)
    end.hurry()
    end.begin(3_600.0, 1_000)
    await asyncio.sleep(0.1)
    assert not wire.is_closed
    end.hurry()
    async with asyncio.timeout(20):
        await wire.closed.wait()
