"""How connections of HTTP end: what was said is heard, and who is in the way is let go."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.router.http.guard import GuardedProtocol

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
Connect = Callable[[Served], socket.socket]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
SIZED = HEAD + b"Content-Length: 4000000\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENCE = 60.0
"""Seconds that the router gives who owes it something: more than a test may take."""


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Connections by hand, closed with the test; the router is patient with them."""
    monkeypatch.setattr("tandem.router.server.BODY_GRACE", PATIENCE)
    with ExitStack() as opened:

        def make(served: Served) -> socket.socket:
            where = ("127.0.0.1", int(served.url.rpartition(":")[2]))
            return opened.enter_context(closing(socket.create_connection(where, timeout=20)))

        yield make


def connections(served: Served) -> list[GuardedProtocol]:
    """Those that the server has not let go of."""
    return list(served.server.server_state.connections)  # type: ignore[arg-type]


def is_answered(wire: socket.socket) -> bool:
    return bool(select.select([wire], [], [], 0)[0])


def heard(wire: socket.socket) -> bytes:
    """All that comes; raises where the connection is reset."""
    seen = b""
    while part := wire.recv(1 << 16):
        seen += part
    return seen


@pytest.mark.parametrize(
    ("first", "status", "settings"),
    [
        (SIZED, 413, {"max_body_bytes": 1 << 20}),
        (CHUNKED + b"7d0\r\n" + b"x" * 2_000, 413, {"max_body_bytes": 1_000}),
        (SIZED, 408, {"body_timeout": 0.1}),
        (b"GET /", 408, {"header_timeout": 0.1}),
        (b"GET /" + b"x" * 70_000, 431, {}),
        (CHUNKED + b"no size\r\n", 400, {}),
        (CHUNKED + b"1\r\nx\r\n" * 2_000, 400, {}),
        (b"", 503, {"max_connections_per_client": 1}),
        (SIZED, 503, {"max_connections": 1}),
    ],
    ids=[
        *("declared", "too large", "too slow", "a slow head", "a large head", "malformed"),
        *("small chunks", "too many of a client", "too many"),
    ],
)
def test_who_sends_all_before_it_reads_hears_the_answer(
    serve: Serve, decode: Make, connect: Connect, first: bytes, status: int, settings: Any
) -> None:
    """As most clients do; a connection that is closed over unread bytes is reset, and its answer
    is lost."""
    served = serve(decode(), wait=False, **settings)
    served.wait_started()
    if status == 503:
        connect(served).sendall(GET[:-1])
        wait_for(lambda: connections(served))
    wire = connect(served)
    wire.sendall(first)
    wait_for(lambda: is_answered(wire))
    for _ in range(32):
        wire.sendall(b"x" * (16 << 10))
    wire.shutdown(socket.SHUT_WR)

    head, _, body = heard(wire).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert head.lower().count(b"connection: close") == 1
    assert json.loads(body)["error"]["message"]


def test_an_answer_is_not_taken_for_that_to_another_request(
    serve: Serve, decode: Make, connect: Connect
) -> None:
    """What is wrong with a body whose request has its answer is said to nobody."""
    served = serve(decode(), wait=False, api_key=("k",))
    served.wait_started()
    wire = connect(served)
    wire.sendall(CHUNKED)
    wait_for(lambda: is_answered(wire))
    wire.sendall(b"no size\r\n")
    assert heard(wire).count(b"HTTP/1.1 ") == 1


def lingering(served: Served, connect: Connect) -> socket.socket:
    """A client that has its answer, and neither sends the rest of its request nor leaves."""
    wire = connect(served)
    wire.sendall(SIZED)
    assert b" 413 " in heard(wire)
    wait_for(lambda: any(each.is_lingering() for each in connections(served)))
    return wire


def test_who_lingers_takes_no_room(serve: Serve, decode: Make, connect: Connect) -> None:
    """It goes when another comes to a full house."""
    served = serve(decode(), wait=False, max_connections=1, max_body_bytes=1_000)
    served.wait_started()
    lingering(served, connect)
    wire = connect(served)
    wire.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert b" 200 OK" in heard(wire)


def test_who_lingers_takes_nothing_of_its_clients_share(
    serve: Serve, decode: Make, connect: Connect
) -> None:
    """Another connection of the same address is welcome."""
    served = serve(decode(), wait=False, max_connections_per_client=1, max_body_bytes=1_000)
    served.wait_started()
    lingering(served, connect)
    assert served.get("/health") == {"status": "ok"}


def test_who_lingers_does_not_hold_up_the_end(serve: Serve, decode: Make, connect: Connect) -> None:
    """A router that stops waits for it for a moment, however long its answers may take."""
    served = serve(decode(), wait=False, drain_timeout=PATIENCE, max_body_bytes=1_000)
    served.wait_started()
    lingering(served, connect)
    served.stop()


def test_a_connection_waits_for_its_next_request_as_long_as_is_said(
    serve: Serve, decode: Make, connect: Connect
) -> None:
    served = serve(decode(), wait=False, keep_alive_timeout=0.1)
    served.wait_started()
    wire = connect(served)
    wire.sendall(GET)
    assert heard(wire).startswith(b"HTTP/1.1 200 OK")


class Rpc:
    """A gRPC server whose calls take as long as a test wants."""

    def __init__(self) -> None:
        self._done = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def stop(self, _: float) -> None:
        self._loop = asyncio.get_running_loop()
        await self._done.wait()

    def end(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._done.set)


def stop_with_calls(serve: Serve, decode: Make, *, signals: int) -> tuple[Served, Rpc]:
    """A router that has calls of gRPC alone when it is told to end."""
    served, rpc = serve(decode(), wait=False, drain_timeout=PATIENCE), Rpc()
    served.wait_started()
    served.app.state.rpc = rpc
    for _ in range(signals):
        served.server.handle_exit(signal.SIGTERM, None)
    served.server._captured_signals.clear()
    wait_for(lambda: not any(each.is_serving() for each in served.server.servers))
    return served, rpc


def test_a_router_that_waits_for_calls_is_scraped(serve: Serve, decode: Make) -> None:
    """Until they have ended, though no request of HTTP is left."""
    served, rpc = stop_with_calls(serve, decode, signals=1)
    wait_for(lambda: served.server._late_servers)
    with httpx.Client(verify=clear_text.NO_TLS) as client:
        for _ in range(8):
            wait_for(lambda: client.get(served.url + "/health").status_code == 200, every=0.1)
            select.select([], [], [], 0.1)
    rpc.end()
    served.stop()
    with pytest.raises(httpx.ConnectError):
        clear_text.get(served.url + "/health")


def test_who_came_late_is_seen_off(serve: Serve, decode: Make, connect: Connect) -> None:
    """Its connection ends in order, and before the loop does."""
    served, rpc = stop_with_calls(serve, decode, signals=1)
    wire = connect(served)
    wire.sendall(GET)
    assert b" 200 OK" in wire.recv(1 << 16)
    rpc.end()
    assert heard(wire).count(b"HTTP/1.1 ") == 0
    served.stop()
    assert not served.server._late.connections


def test_a_second_signal_ends_calls_at_once(serve: Serve, decode: Make) -> None:
    """However long they may still take."""
    served, _ = stop_with_calls(serve, decode, signals=2)
    served.stop()
