"""Clients that leave an answer unread: their connections close, and others get the room."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from tests.waiting import wait_for

from tandem.router.http import guard
from tandem.router.http.guard import GuardedProtocol, guarded
from tandem.router.http.protocol import ConnectionLimits

LARGE = 48 << 10
"""More than both kernels' buffers take, less than what makes the server wait with a write."""
LENGTH = b"content-length"


class Served:
    """A server of answers with guarded connections, in a thread with a loop of its own."""

    def __init__(self, **limits: Any) -> None:
        self.held = threading.Event()
        self.holding = threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        protocol = guarded(ConnectionLimits(**{"write_seconds": 2.0, **limits}))
        self.server = uvicorn.Server(
            uvicorn.Config(
                self.answer,
                loop="uvloop",
                http=protocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                timeout_keep_alive=75,
            )
        )
        self._thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self._thread.start()
        wait_for(lambda: self.server.started)

    @property
    def connections(self) -> list[GuardedProtocol]:
        """Those that the server has not let go of."""
        return list(self.server.server_state.connections)  # type: ignore[arg-type]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        body = b"x" * (8 if path == "/small" else LARGE)
        headers = [(LENGTH, b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if path == "/stop":  # the whole loop, while clients come
            self.holding.set()
            self.held.wait(20)
        if path in ("/raises", "/returns"):
            await send({"type": "http.response.body", "body": body[1:], "more_body": True})
            if path == "/raises":
                raise RuntimeError("the rest is lost")
            return
        await send({"type": "http.response.body", "body": body})

    def stop(self) -> None:
        self.held.set()
        self.server.should_exit = self.server.force_exit = True
        self._thread.join(15)
        self.socket.close()
        assert not self._thread.is_alive()


@pytest.fixture
def start() -> Iterator[Callable[..., Served]]:
    """Start servers; all end with the test."""
    with ExitStack() as ends:

        def make(**limits: Any) -> Served:
            served = Served(**limits)
            ends.callback(served.stop)
            return served

        yield make


Start = Callable[..., Served]


@pytest.fixture
def connect() -> Iterator[Callable[[Served], socket.socket]]:
    """Connections with little room for what is not read, closed with the test."""
    with ExitStack() as opened:

        def make(served: Served) -> socket.socket:
            wire = opened.enter_context(closing(socket.socket()))
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.settimeout(10)
            wire.connect(served.socket.getsockname())
            return wire

        yield make


Connect = Callable[[Served], socket.socket]


def get(path: str, *more: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


def left_unread(
    served: Served, connect: Connect, request: bytes
) -> tuple[socket.socket, GuardedProtocol]:
    """Ask by a new connection, and wait until the answer is out as far as it goes."""
    before = served.connections
    wire = connect(served)
    wire.sendall(request)
    (connection,) = wait_for(lambda: [c for c in served.connections if c not in before])
    wait_for(connection.transport.get_write_buffer_size)
    return wire, connection


@pytest.mark.full
@pytest.mark.parametrize(
    ("request_", "then"),
    [
        (get("/large", "Connection: close"), b""),
        (get("/large"), b"no request\r\n\r\n"),
        (get("/raises"), b""),
        (get("/returns"), b""),
    ],
    ids=["told to close", "refused the next", "broken off", "not finished"],
)
def test_a_connection_that_closes_waits_for_its_client_for_a_time(
    start: Start, connect: Connect, request_: bytes, then: bytes
) -> None:
    """Too little is unsent for a write to wait for it, and no more is written."""
    served = start()
    wire, connection = left_unread(served, connect, request_)
    wire.sendall(then)
    assert 0 < connection.transport.get_write_buffer_size() < 64 << 10
    wait_for(lambda: not served.connections)


def test_so_does_one_that_idled_for_its_time(start: Start, connect: Connect) -> None:
    served = start()
    served.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]
    left_unread(served, connect, get("/large"))
    wait_for(lambda: not served.connections)


def test_so_does_one_whose_client_says_nothing_more(start: Start, connect: Connect) -> None:
    """It has closed its half, with its answer unread."""
    served = start()
    wire, _ = left_unread(served, connect, get("/large"))
    wire.shutdown(socket.SHUT_WR)
    wait_for(lambda: not served.connections)


def test_who_reads_slowly_gets_the_rest(start: Start, connect: Connect) -> None:
    served = start(write_seconds=5.0)
    wire, _ = left_unread(served, connect, get("/large", "Connection: close"))
    seen = b""
    while part := wire.recv(1 << 16):
        seen += part
    assert seen.endswith(b"x" * LARGE)


def test_who_comes_at_once_with_many_takes_one_place(start: Start, connect: Connect) -> None:
    """The idle connection goes for the first of them; it is still there when the others come, as
    its client leaves its answer unread."""
    served = start(connections=4, write_seconds=60.0)
    for count in range(1, 4):
        connect(served).sendall(b"GET /")
        wait_for(lambda count=count: len(served.connections) == count)  # type: ignore[misc]
    connect(served).sendall(get("/stop"))  # idle when it has its answer
    wait_for(served.holding.is_set)
    many = [connect(served) for _ in range(10)]
    begun, rest = get("/small")[:5], get("/small")[5:]
    for wire in many:
        wire.sendall(begun)
    served.held.set()
    wait_for(lambda: len(served.connections) == 14)
    for wire in many:
        wire.sendall(rest)
    answers = [wire.recv(1 << 16).split(b" ")[1] for wire in many]
    assert sorted(answers) == [b"200"] + [b"503"] * 9


def test_what_idles_with_its_answer_unread_is_no_endless_room(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is let go once, with the rest of its answer; where many go like that, without it."""
    monkeypatch.setattr(guard, "SPARE_CONNECTIONS", 1)
    served = start(connections=2, write_seconds=60.0)
    for _ in range(6):
        left_unread(served, connect, get("/large"))
        wait_for(lambda: len(served.connections) <= 3)
    assert sum(each.transport.is_closing() for each in served.connections) == 1
