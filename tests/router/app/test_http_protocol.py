"""How answers are put on the wire: headers with the first of the body, and never kept back."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from tests.router.app.test_http_connection import Connection
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from uvicorn.server import ServerState

from tandem.router.http.guard import guarded
from tandem.router.http.protocol import ConnectionLimits, JoinedTransport

BODY = json.dumps({"prompt": "a", "max_tokens": 4, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
POST = HEAD % len(BODY) + BODY


@pytest.fixture
def wire(
    serve: Callable[..., Served], decode: Callable[..., FakeWorker]
) -> Iterator[socket.socket]:
    """A connection to a router, by hand."""
    where = urlsplit(serve(decode()).url)
    assert where.hostname
    assert where.port
    with closing(socket.create_connection((where.hostname, where.port), timeout=10)) as made:
        yield made


def read_until(wire: socket.socket, end: bytes) -> bytes:
    """All that comes until ``end`` is in it."""
    seen = b""
    while end not in seen:
        part = wire.recv(1 << 16)
        assert part, f"the connection ended after {seen!r}"
        seen += part
    return seen


class Written(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.parts.append(bytes(data))

    def close(self) -> None:
        self.parts.append(b"closed")


async def test_headers_and_the_first_of_the_body_are_one_write() -> None:
    below = Written()
    let_go: list[asyncio.Transport] = []
    joined = JoinedTransport(below, let_go.append)
    joined.write(b"headers ")
    assert let_go == []
    joined.write(b"first")
    assert let_go == [below]
    joined.write(b"second")
    await asyncio.sleep(0)
    joined.write(b"third")
    assert let_go == [below]
    assert below.parts == [b"headers first", b"second", b"third"]


async def test_headers_go_out_at_the_end_of_the_turn_or_with_the_end() -> None:
    below = Written()
    joined = JoinedTransport(below, lambda _: None)
    joined.write(b"headers")
    await asyncio.sleep(0)
    assert below.parts == [b"headers"]
    other = JoinedTransport(below, lambda _: None)
    other.write(b"others")
    other.close()
    assert below.parts == [b"headers", b"others", b"closed"]


def test_a_connection_goes_on_after_a_stream(wire: socket.socket) -> None:
    """The next answer of the same connection has headers of its own."""
    for _ in range(2):
        wire.sendall(POST)
        seen = read_until(wire, b"0\r\n\r\n")
        assert seen.startswith(b"HTTP/1.1 200 OK\r\n")
        assert seen.count(b"data: [DONE]") == 1


def test_headers_without_a_body_are_not_kept_back(wire: socket.socket) -> None:
    """An answer to HEAD is headers alone."""
    wire.sendall(b"HEAD /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert read_until(wire, b"\r\n\r\n").startswith(b"HTTP/1.1 405 ")


def test_requests_that_come_together_are_answered_in_turn(wire: socket.socket) -> None:
    """Pipelined: the answers do not mix."""
    wire.sendall(POST + b"HEAD /ready HTTP/1.1\r\nHost: localhost\r\n\r\n" + POST)
    seen = read_until(wire, b"[DONE]")
    while seen.count(b"0\r\n\r\n") < 2 or seen.count(b"[DONE]") < 2:
        seen += read_until(wire, b"\n")
    statuses = [line for line in seen.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert [line.split()[1] for line in statuses] == [b"200", b"405", b"200"]


def test_a_client_that_waits_to_send_its_body_is_told_to_go_on(wire: socket.socket) -> None:
    """100-continue comes before there is any answer."""
    head, _, body = POST.partition(b"\r\n\r\n")
    wire.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
    assert read_until(wire, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.sendall(body)
    assert b"HTTP/1.1 200 OK\r\n" in read_until(wire, b"[DONE]")


@pytest.mark.parametrize(
    ("request_", "end"),
    [
        (POST.replace(b"HTTP/1.1", b"HTTP/1.0"), b"\n\ndata: [DONE]\n\n"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"\r\n\r\n" + b'{"status":"ok"}'),
        (b"HEAD /ready HTTP/1.0\r\n\r\n", b"\r\n\r\n"),
    ],
    ids=["stream", "whole", "head"],
)
def test_http_1_0_hears_no_chunks(wire: socket.socket, request_: bytes, end: bytes) -> None:
    """It knows none: an answer without a length ends with the connection."""
    wire.sendall(request_)
    seen = b""
    while part := wire.recv(1 << 16):
        seen += part
    assert b"transfer-encoding" not in seen
    assert seen.endswith(end)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("why", ["app", "router", "client"])
async def test_a_part_of_an_answer_does_not_seem_the_whole(version: bytes, why: str) -> None:
    """Where its end is the connection's, one that breaks off is reset; others end in order."""
    client, breaks = Connection(), asyncio.Event()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        """Gives the first of what was to be more."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: part\n\n", "more_body": True})
        await breaks.wait()
        raise ValueError("no more")

    client.protocol.app = app
    await client.says(b"GET / HTTP/%b\r\nConnection: keep-alive\r\n\r\n" % version)
    assert b"data: part" in client.wire.written
    if why == "app":
        breaks.set()
    elif why == "client":
        client.protocol.eof_received()
    await client.says(b"no request\r\n\r\n" if why == "router" else b"")
    assert client.wire.is_closed is (version == b"1.0")
    assert client.wire.is_ended is (version == b"1.1" and why != "client")
    breaks.set()
    client.leaves()
    await asyncio.sleep(0)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("make_loop", [asyncio.SelectorEventLoop, uvloop.Loop])
def test_a_connection_that_breaks_off_is_reset(make_loop: Any, is_whole: bool) -> None:
    """A socket that is closed, however suddenly, says otherwise that this was all."""

    async def ask() -> bytes:
        breaks = asyncio.Event()

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await breaks.wait()
            if not is_whole:
                raise ValueError("no more")
            await send({"type": "http.response.body", "body": b", last"})

        config = uvicorn.Config(app, interface="asgi3", lifespan="off", ws="none", log_config=None)
        server = await asyncio.get_running_loop().create_server(
            lambda: guarded(ConnectionLimits())(
                config=config, server_state=ServerState(), app_state={}
            ),
            *("127.0.0.1", 0),
        )
        async with server, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            head = await reader.readuntil(b"first")
            breaks.set()
            try:
                return head + await reader.read()
            finally:
                writer.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        if is_whole:
            assert runner.run(ask()).endswith(b"\r\n\r\nfirst, last")
        else:
            with pytest.raises(ConnectionResetError):
                runner.run(ask())
