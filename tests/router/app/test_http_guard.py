"""What a stranger's connection may take: real sockets that send slowly, much, or nothing."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def connect() -> Iterator[Callable[[Served], socket.socket]]:
    """Connections by hand, closed with the test."""
    with ExitStack() as opened:

        def make(served: Served) -> socket.socket:
            where = served.socket.getsockname()
            return opened.enter_context(closing(socket.create_connection(where, timeout=10)))

        yield make


Connect = Callable[[Served], socket.socket]


def all_of(wire: socket.socket) -> bytes:
    seen = b""
    while True:
        try:
            part = wire.recv(1 << 16)
        except ConnectionResetError:
            return seen
        if not part:
            return seen
        seen += part


def flood(wire: socket.socket, data: bytes, most: int) -> int:
    """Send ``data`` again and again until the router has had enough; bytes that went out."""
    sent = 0
    try:
        while sent < most and not select.select([wire], [], [], 0)[0]:
            sent += wire.send(data)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"x" * 10_000),
        (b"GET /live HTTP/1.1\r\nX-Long: ", b"x" * 10_000),
        (b"GET /live HTTP/1.1\r\n", b"X-A: b\r\n" * 1_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 10_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: b\r\n" * 1_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"b" * 10_000),
    ],
    ids=["path", "header", "headers", "chunk extension", "trailers", "trailer"],
)
def test_a_head_ends_somewhere(
    serve: Serve, decode: Make, connect: Connect, begin: bytes, more: bytes
) -> None:
    """Before any key was asked for, at 64 KiB or 128 headers, whatever grows."""
    served = serve(decode(), wait=False, api_key=("k",))
    served.wait_started()
    wire = connect(served)
    wire.sendall(begin)
    sent = flood(wire, more, 50_000_000)

    assert sent < 20_000_000  # what the kernel's buffers on both sides may hold, at most
    answer = all_of(wire)
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"431", b"401")
    assert served.get("/live") == {"status": "ok"}


def test_a_head_that_is_too_large_is_told_so(serve: Serve, decode: Make, connect: Connect) -> None:
    """431 with OpenAI's error object, also when all of it comes at once."""
    served = serve(decode(), wait=False)
    served.wait_started()
    for head in (b"X-A: " + b"x" * 70_000, b"X-A: b\r\n" * 129):
        wire = connect(served)
        wire.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + head.rstrip() + b"\r\n\r\n")
        status, _, rest = all_of(wire).partition(b"\r\n")
        assert status.split()[1] == b"431"
        assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


def test_a_large_head_within_the_limit_is_read(serve: Serve, decode: Make) -> None:
    served = serve(decode())
    answer = served.post(
        "/v1/completions",
        json={"prompt": "a", "max_tokens": 1},
        headers={f"X-{n}": "v" * 500 for n in range(100)},
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /", b"\r\n", GET + b"GET /he"])
def test_a_head_has_a_deadline(serve: Serve, decode: Make, connect: Connect, sent: bytes) -> None:
    """From the first byte, or from the connection when none comes at all."""
    served = serve(decode(), wait=False, header_timeout=0.2)
    served.wait_started()
    wire = connect(served)
    wire.sendall(sent)

    answer = all_of(wire)

    assert answer.count(b"HTTP/1.1 408 ") == 1
    assert answer.count(b"HTTP/1.1 200 ") == sent.count(GET)


def test_empty_lines_are_no_request(serve: Serve, decode: Make, connect: Connect) -> None:
    """They keep no idle connection open, and are none that came too slowly."""
    served = serve(decode(), wait=False, header_timeout=0.5, keep_alive_timeout=1.5)
    served.wait_started()
    wire = connect(served)
    wire.sendall(GET)
    assert b" 200 OK" in wire.recv(1 << 16)
    with suppress(OSError):  # once the connection has ended
        while not select.select([wire], [], [], 0.05)[0]:
            wire.sendall(b"\r\n")
    assert all_of(wire) == b""


def test_a_body_that_nobody_waits_for_has_a_deadline(
    serve: Serve, decode: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is out, the body of the refused request trickles: the connection ends."""
    monkeypatch.setattr("tandem.router.server.BODY_GRACE", 0.1)
    served = serve(decode(), wait=False, api_key=("k",))
    served.wait_started()
    wire = connect(served)
    wire.sendall(HEAD + b"Content-Length: 1000\r\n\r\nx")
    assert b"401" in all_of(wire)


@pytest.mark.full
@pytest.mark.parametrize("rest", [b"", b"1;" + b"x" * 60_000])
def test_chunks_that_nobody_waits_for_have_a_deadline(
    serve: Serve, decode: Make, connect: Connect, rest: bytes
) -> None:
    """Also below the limit of framing: 401 is said at once, and not waited upon for a minute."""
    served = serve(decode(), wait=False, api_key=("k",))
    served.wait_started()
    wire = connect(served)
    wire.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    assert b" 401 " in wire.recv(1 << 16)
    wire.sendall(rest)
    assert all_of(wire) == b""


def test_after_an_unwanted_body_the_connection_idles(
    serve: Serve, decode: Make, connect: Connect
) -> None:
    """It serves the next request, and does not stay for ever without one."""
    served = serve(decode(), wait=False)
    served.wait_started()
    wire = connect(served)
    wire.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n")
    assert b"200 OK" in wire.recv(1 << 16)
    wire.sendall(b"abcd")
    (connection,) = served.server.server_state.connections
    wait_for(lambda: connection.idle)  # type: ignore[union-attr]
    wire.sendall(GET)
    assert b"200 OK" in wire.recv(1 << 16)


def test_connections_are_counted(serve: Serve, decode: Make, connect: Connect) -> None:
    """Beyond the cap the idle go first; then only probes are answered, and beyond that nobody."""
    served = serve(decode(), wait=False, max_connections=4)
    served.wait_started()
    busy = [connect(served) for _ in range(4)]
    for wire in busy:
        wire.sendall(b"GET /")
    wait_for(lambda: len(served.server.server_state.connections) == 4)

    late = connect(served)
    late.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 503 " in all_of(late)
    probe = connect(served)
    probe.sendall(GET)
    assert b" 200 OK" in probe.recv(1 << 16)
    busy[0].sendall(b"live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 200 OK" in busy[0].recv(1 << 16)
    (idle,) = [each for each in served.server.server_state.connections if each.idle][:1]  # type: ignore[union-attr]
    welcome = connect(served)
    wait_for(lambda: idle not in served.server.server_state.connections)
    welcome.sendall(GET)
    assert b" 200 OK" in welcome.recv(1 << 16)


def test_one_address_has_a_share(serve: Serve, decode: Make, connect: Connect) -> None:
    served = serve(decode(), wait=False, max_connections_per_client=2)
    served.wait_started()
    first, second = connect(served), connect(served)
    for wire in (first, second):
        wire.sendall(GET)
        assert b" 200 OK" in wire.recv(1 << 16)
    third = connect(served)
    assert b"503" in all_of(third)
    third.close()
    first.close()
    wait_for(lambda: len(served.server.server_state.connections) == 1)
    fourth = connect(served)
    fourth.sendall(GET)
    assert b" 200 OK" in fourth.recv(1 << 16)


def test_pipelined_requests_are_few(serve: Serve, decode: Make, connect: Connect) -> None:
    """Thousands of them behind one answer end the connection."""
    served = serve(decode(step=0.05), max_parallel_prompts=1)
    wire = connect(served)
    body = json.dumps({"prompt": "a", "max_tokens": 9, "stream": True}).encode()
    post = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    wire.sendall(post + GET * 40)
    assert all_of(wire).count(b"HTTP/1.1 ") <= 1


def test_bodies_share_a_limit(serve: Serve, decode: Make, connect: Connect) -> None:
    """Half-sent bodies of many do not fill the memory; 503 until some are through."""
    served = serve(decode(), max_bodies_bytes=100_000, max_body_bytes=90_000, body_timeout=0.5)
    halves: list[socket.socket] = []
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "user": "u" * 400}
    large = json.dumps(body).encode() + b" " * 50_000

    def is_full() -> bool:
        """With another half-sent one, as the last may have run out of time before the look."""
        halves.append(connect(served))
        halves[-1].sendall(HEAD + b"Content-Length: 90000\r\n\r\n" + b" " * 80_000)
        return served.post("/v1/completions", content=large).status_code == 503

    wait_for(is_full)
    assert served.post("/v1/completions", json=body).status_code == 200
    for half in halves:
        all_of(half)
    assert served.post("/v1/completions", content=large).status_code == 200
