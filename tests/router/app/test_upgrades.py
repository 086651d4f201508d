"""A request to upgrade is answered as HTTP/1.1 with its body, and unclear framing is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.router.app.test_access import Ran, answer_of
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

CLIENTS = Path(__file__).parents[2] / "clients"
BODY = json.dumps({"model": "fake", "prompt": "Hi", "max_tokens": 1}).encode()
SIZED = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\n",
    b"Upgrade: h2c\r\nConnection: keep-alive, Upgrade\r\n",
    b"Connection: Upgrade\r\nConnection: HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings:\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n",
]


@pytest.fixture
def server(serve: Callable[..., Served], decode: Callable[..., FakeWorker]) -> Served:
    return serve(decode(), max_headers=16)


def send(server: Served, *parts: bytes, answers: int = 1) -> list[Ran | None]:
    """Send the parts, each in a packet of its own; the answers."""
    with socket.create_connection(server.socket.getsockname(), timeout=30) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            wire.sendall(part)
        with wire.makefile("rb") as read:
            return [answer_of(read) for _ in range(answers)]


def head(upgrade: bytes, framing: bytes, path: bytes = b"/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b%b\r\n" % (path, upgrade, framing)


def cut(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.full
@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize(("framing", "body"), [(SIZED, BODY), (CHUNKED, CHUNKS)])
def test_a_request_to_upgrade_is_answered_with_its_body(
    server: Served, upgrade: bytes, framing: bytes, body: bytes
) -> None:
    """However it is cut into packets, and with others before and after it on its connection."""
    whole, plain = head(upgrade, framing) + body, head(b"", framing) + body
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % upgrade
    cases = [
        ((whole,), [200]),
        ((head(upgrade, framing), body), [200]),
        ((whole[:-7], whole[-7:]), [200]),
        (tuple(cut(whole, 3)), [200]),
        ((plain + whole + get + whole + plain,), [200] * 5),
        ((get, get + whole), [200] * 3),
    ]
    for parts, expected in cases:
        ran = send(server, *parts, answers=len(expected))
        assert [each and each.status for each in ran] == expected, parts


def test_a_head_that_comes_again_counts_once(server: Served) -> None:
    """The limit of headers is the same with an upgrade as without it."""
    more = b"".join(b"X-%d: y\r\n" % number for number in range(10))
    (ran,) = send(server, head(UPGRADES[0] + more, SIZED) + BODY)
    assert ran
    assert ran.status == 200
    (ran,) = send(server, head(UPGRADES[0] + more + more, SIZED) + BODY)
    assert ran
    assert ran.status == 431


@pytest.mark.parametrize(
    ("version", "framing"),
    [
        (b"1.1", b"Transfer-Encoding: gzip, chunked\r\n"),
        (b"1.1", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"),
        (b"1.1", b"Transfer-Encoding: chunked, chunked\r\n"),
        (b"1.1", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
        (b"1.1", b"Transfer-Encoding: identity, chunked\r\n"),
        (b"1.1", b"Transfer-Encoding: deflate,chunked\r\n"),
        (b"1.1", b"Transfer-Encoding: chunked;q=1\r\n"),
        (b"1.1", b"Transfer-Encoding: xchunked\r\n"),
        (b"1.1", b"Transfer-Encoding: gzip\r\n"),
        (b"1.1", b"Transfer-Encoding:\r\n"),
        (b"1.1", CHUNKED + SIZED),
        (b"1.1", SIZED + b"Content-Length: 5\r\n"),
        (b"1.1", SIZED + b"Host: evil.example\r\n"),
        (b"1.0", CHUNKED),
        (b"1.0", b"Transfer-Encoding: gzip, chunked\r\n"),
        (b"0.9", SIZED),
        (b"2.0", SIZED),
    ],
)
@pytest.mark.parametrize("upgrade", [b"", UPGRADES[0]])
def test_a_request_whose_end_is_not_certain_is_refused(
    server: Served, version: bytes, framing: bytes, upgrade: bytes
) -> None:
    """400, and nothing of what follows is taken for another request."""
    first = head(upgrade, framing).replace(b"HTTP/1.1", b"HTTP/" + version)
    ran, more = send(server, first + CHUNKS + b"GET /version HTTP/1.1\r\n\r\n", answers=2)
    assert ran
    assert ran.status == 400
    assert more is None, "the connection ends"


def test_connect_is_refused(server: Served) -> None:
    """It is no method of a server, though it upgrades."""
    (ran,) = send(server, b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n")
    assert ran
    assert ran.status == 400


def test_the_host_of_an_absolute_url_goes_before_the_header(server: Served) -> None:
    """So that a foreign one cannot hide behind a right header, nor be taken for foreign."""
    for host, header, status in (
        (b"localhost", b"evil.example", 200),
        (b"evil.example", b"localhost", 403),
        (b"user@evil.example", b"localhost", 403),
        (b"localhost@evil.example", b"localhost", 403),
    ):
        request = b"GET http://%b/version HTTP/1.1\r\nHost: %b\r\n\r\n" % (host, header)
        (ran,) = send(server, request)
        assert ran
        assert ran.status == status, request


def run(served: Served, *command: str) -> str:
    found = shutil.which(command[0])
    if found is None:
        pytest.skip(f"{command[0]} is not installed")
    env = {**os.environ, "TANDEM_CLIENTS_URL": served.url, "TANDEM_CLIENTS_KEY": "k"}
    done = subprocess.run([found, *command[1:]], env=env, timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.full
def test_javas_client_gets_its_answers(
    serve: Callable[..., Served], decode: Callable[..., FakeWorker]
) -> None:
    """A chat and a stream, by the client's defaults: it asks for h2c with every call."""
    served = serve(decode(), served_model_name=("smol",))
    lines = run(served, "java", str(CLIENTS / "java/Client.java")).splitlines()
    whole, streamed = map(json.loads, lines)
    assert whole["text"] == streamed["text"] != ""
    assert whole["version"] == "HTTP_1_1"


@pytest.mark.parametrize("flag", ["--http2", "--http1.1", "--http1.0"])
def test_curl_gets_its_answer(server: Served, flag: str) -> None:
    body, url = BODY.decode(), server.url + "/v1/completions"
    told = run(server, "curl", "-sS", flag, url, "-d", body, "-w", "%{http_version} %{http_code}")
    assert told.endswith(" 200")
    assert '"text_completion"' in told
