"""Streams that end while the server still has to do with them: none takes the connection along."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from h2.events import ConnectionTerminated, PingAckReceived, StreamReset
from tests.router.fake_worker import Behaviour, FakeWorker, Turn, serve_well
from tests.router.http_server import ANSWER
from tests.router.rpc.raw_client import RawClient, asked, framed, texts
from tests.waiting import wait_for

from tandem.router.rpc import tandem_pb2 as pb

Make = Callable[..., FakeWorker]
EMBED = "/tandem.v1.Inference/Embed"
EMBED_HI = framed(pb.EmbedRequest(input=["Hi"]).SerializeToString())
LONG = asked(sampling=pb.SamplingParams(max_tokens=200), stream=True)


def held_until(go: threading.Event) -> Behaviour:
    """What is generated begins then; what is pooled is answered at once."""

    def behave(turn: Turn) -> Iterator[float]:
        while turn.request.pooling is None and not go.is_set():
            yield 0.01
        yield from serve_well(turn)

    return behave


@pytest.mark.parametrize("content_type", ["application/grpc", "text/plain"])
@pytest.mark.parametrize("is_followed", [True, False])
def test_a_call_given_up_as_it_was_made_costs_no_other(
    raw: Any, decode: Make, content_type: str, is_followed: bool
) -> None:
    """HEADERS and RST_STREAM in one read, another call behind them or none."""
    go = threading.Event()
    worker = decode(behaviour=held_until(go))
    _, client = raw(worker)
    client.greet()
    older = client.ask(LONG)
    wait_for(lambda: worker.submitted)
    with client.at_once():
        client.h2.reset_stream(client.ask(asked(), content_type=content_type))
        later = client.ask(EMBED_HI, path=EMBED) if is_followed else None
    if later is None:
        client.h2.ping(b"12345678")
        client.flush()
        assert client.until(lambda event: isinstance(event, PingAckReceived)) is not None
        later = client.ask(EMBED_HI, path=EMBED)
    assert client.status(later) == ("0", "")
    go.set()

    assert client.status(older) == ("0", "")
    assert texts(client.data(older)) == ANSWER


def test_calls_given_up_as_they_were_made_are_counted(raw: Any) -> None:
    """Who gives up call after call is sent away, however they come."""
    _, client = raw()
    client.greet()
    with client.at_once():
        for _ in range(150):
            client.h2.reset_stream(client.ask(asked()))
    end: Any = client.until(lambda event: isinstance(event, ConnectionTerminated))

    assert end is not None
    assert end.error_code == 11


@pytest.mark.parametrize("is_all", [True, False])
def test_a_refused_call_costs_no_other(raw: Any, decode: Make, is_all: bool) -> None:
    """Its whole request came in the read in which it is refused, as most do; where more may
    follow, the client is told to send none."""
    go = threading.Event()
    worker = decode(behaviour=held_until(go))
    _, client = raw(worker, max_connections=2)
    client.greet()
    older = client.ask(LONG)
    other = RawClient(client.socket.getpeername()[1]).greet()
    other.ask(LONG)
    wait_for(lambda: len(worker.submitted) == 2)
    with client.at_once():
        refused = client.ask(asked(), is_all=is_all)
    assert client.status(refused) == ("8", "too many calls run")
    go.set()

    assert client.status(older) == ("0", "")
    assert texts(client.data(older)) == ANSWER
    resets = [each for each in client.events if isinstance(each, StreamReset)]
    assert len(resets) == (0 if is_all else 1)
    other.socket.close()


@pytest.mark.parametrize("content_type", ["application/grpc", "text/plain"])
def test_who_takes_leave_as_it_calls_is_let_go(
    raw: Any, content_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """GOAWAY in the read of a call: the connection ends behind its answer."""
    _, client = raw()
    client.greet()
    with client.at_once():
        client.ask(asked(), content_type=content_type)
        client.h2.close_connection()

    while client.socket.recv(65_536):
        pass
    assert not [each for each in caplog.records if each.name == "asyncio"], caplog.text


@pytest.mark.parametrize("code", [0, 2])
def test_who_takes_leave_hears_the_calls_that_run(raw: Any, decode: Make, code: int) -> None:
    """Then the connection ends. A GOAWAY with an error ends them as well."""
    go = threading.Event()
    worker = decode(behaviour=held_until(go))
    _, client = raw(worker)
    client.greet()
    stream = client.ask(LONG)
    wait_for(lambda: worker.submitted)
    client.socket.sendall(b"\0\0\x08\x07" + bytes(9) + code.to_bytes(4, "big"))
    if code:
        wait_for(lambda: worker.cancelled)
        go.set()
        return
    client.h2.ping(b"12345678")
    client.flush()
    assert client.until(lambda event: isinstance(event, PingAckReceived)) is not None
    go.set()

    assert client.status(stream) == ("0", "")
    assert texts(client.data(stream)) == ANSWER
    assert client.until(lambda event: False) is None
