"""The HTTP/2 under gRPC, by a client that sends what it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, PingAckReceived, ResponseReceived
from h2.settings import SettingCodes
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import ANSWER
from tests.router.rpc.raw_client import RawClient, asked, framed, is_end, texts
from tests.router.rpc.test_rpc import hold
from tests.waiting import wait_for

from tandem.router.rpc import inference
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.frames import Frame, Frames
from tandem.router.rpc.reading import generation_body

Make = Callable[..., FakeWorker]


def test_answers_fit_into_any_window(raw: Any) -> None:
    """A client that takes 10 bytes at a time hears all, and nothing beyond its windows."""
    _, client = raw()
    client.greet(INITIAL_WINDOW_SIZE=10)
    sampling = pb.SamplingParams(max_tokens=200)
    stream = client.ask(asked(sampling=sampling, stream=True))

    assert client.status(stream) == ("0", "")
    assert texts(client.data(stream)) == ANSWER


def test_a_window_that_never_opens_ends_the_call(raw: Any) -> None:
    """Within the request's time, which on a busy machine may be too short for the worker's first
    word; the connection goes on."""
    _, client = raw()
    client.socket.settimeout(60)  # nothing comes for as long as a call may take
    client.greet(INITIAL_WINDOW_SIZE=10)
    came = 0
    for timeout in ("500m", "4S", "30S"):
        stream = client.ask(asked(stream=True), grpc_timeout=timeout)
        assert client.until(is_end, acknowledge=False) is not None
        came = len(client.data(stream))
        client.events.clear()
        if came:
            break
    assert came == 10
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65_535})

    assert client.status(client.ask(asked()))[0] == "0"


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (asked(), {"path": "/tandem.v1.Inference/Nothing"}, "12", "no method"),
        (framed(b"x", compressed=1), {}, "12", "uncompressed"),
        (asked(), {"grpc_encoding": "gzip"}, "12", "grpc-encoding"),
        (framed(b"\xff\xff"), {}, "3", "type"),
        (b"", {}, "3", "one message"),
        (asked() + asked(), {}, "3", "one message"),
        (asked()[:-1], {}, "3", "cut short"),
        (framed(b"a" * 20_000), {}, "8", "10000 bytes"),
    ],
)
def test_what_no_method_takes_is_told(
    raw: Any, body: bytes, headers: Any, status: str, words: str
) -> None:
    """By a status, and the next call is answered."""
    _, client = raw(max_body_bytes=10_000)
    client.greet()
    code, message = client.status(client.ask(body, **headers))

    assert (code, words in message) == (status, True), message
    assert client.status(client.ask(asked()))[0] == "0"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a\nb", r"a\nb"),
        ("a\0b", r"a\x00b"),
        ("naïve", r"na\xefve"),
        ("日", r"\u65e5"),
        ("a ", "a"),
    ],
)
def test_a_clients_names_come_back_as_metadata_may_have_them(
    raw: Any, name: str, told: str
) -> None:
    """A client takes a line break in a value for an error of the whole connection."""
    _, client = raw()
    client.greet()
    sampling = pb.SamplingParams()
    sampling.vllm_xargs[name].values.add()
    stream = client.ask(asked(sampling=sampling))

    assert client.status(stream)[0] == "3"
    last: Any = client.until(lambda event: isinstance(event, ResponseReceived))
    assert dict(last.headers)["tandem-error-param"] == f"vllm_xargs.{told}"


def test_what_is_no_grpc_is_415(raw: Any) -> None:
    """As gRPC has it."""
    _, client = raw()
    client.greet()
    client.ask(b"", content_type="text/plain")
    answer: Any = client.until(lambda event: isinstance(event, ResponseReceived))

    assert dict(answer.headers)[":status"] == "415"


def test_bodies_of_all_calls_are_bounded_together(raw: Any) -> None:
    """What is beyond is UNAVAILABLE, and what was held is given back."""
    served, client = raw(max_bodies_bytes=30_000, max_body_bytes=20_000)
    client.greet()
    waiting = client.ask(framed(b"a" * 16_000)[:16_000], is_all=False)
    wait_for(lambda: served.app.state.rpc.held.num_bytes == 16_000)
    over = client.ask(framed(b"a" * 16_000)[:16_000])
    assert client.status(over)[0] == "14"
    client.h2.reset_stream(waiting)
    client.flush()

    wait_for(lambda: served.app.state.rpc.held.num_bytes == 0)


def test_who_says_nothing_is_let_go(raw: Any) -> None:
    """After the time that a head of HTTP has, too."""
    _, client = raw(header_timeout=0.3)

    assert client.until(lambda event: False) is None


def test_who_gives_up_call_after_call_is_sent_away(raw: Any, decode: Make) -> None:
    """Beginning and ending calls costs the server more than the client."""
    _, client = raw(decode(behaviour=hold))
    client.greet()
    ends = PingAckReceived, ConnectionTerminated
    told, end = 0, None
    while end is None and told < 300:
        told += 1
        client.h2.reset_stream(client.ask(asked(stream=True)))
        client.h2.ping(b"12345678")
        client.flush()
        client.until(lambda event: isinstance(event, ends))
        end = next((e for e in client.events if isinstance(e, ConnectionTerminated)), None)
        client.events.clear()
    assert end is not None
    assert end.error_code == 11
    assert 100 <= told < 110


@pytest.mark.parametrize("nonsense", [True, False])
def test_calls_of_a_connection_that_ends_are_given_up(
    raw: Any, decode: Make, nonsense: bool
) -> None:
    """Also where the client ends it by nonsense: its workers stop."""
    worker = decode(behaviour=hold)
    served, client = raw(worker)
    client.greet()
    client.ask(asked(stream=True))
    wait_for(lambda: worker.submitted)
    if nonsense:
        client.socket.sendall(bytes.fromhex("00000408000000000000000000"))
    else:
        client.socket.close()
    wait_for(lambda: worker.cancelled)
    wait_for(lambda: "tandem:router_requests_cancelled_total 1.0" in served.metrics())


def test_pings_are_answered_and_nonsense_ends_the_connection(raw: Any) -> None:
    """The first by hand, the second by the state machine."""
    _, client = raw()
    client.greet()
    client.h2.ping(b"12345678")
    client.flush()
    answer: Any = client.until(lambda event: isinstance(event, PingAckReceived))
    assert answer.ping_data == b"12345678"
    for nonsense in (b"\0\0\4\x08\0\0\0\0\0\0\0\0\0", b"\0\0\x08\x06\0\0\0\0\1" + bytes(8)):
        served_again = RawClient(client.socket.getpeername()[1]).greet()
        served_again.socket.sendall(nonsense)
        end: Any = served_again.until(lambda event: isinstance(event, ConnectionTerminated))
        assert end is None or end.error_code
        served_again.socket.close()


def test_a_full_house_lets_the_idle_go(raw: Any) -> None:
    """A connection without calls makes room for another."""
    _, client = raw(max_connections=1)
    client.greet()
    assert client.status(client.ask(asked()))[0] == "0"
    other = RawClient(client.socket.getpeername()[1]).greet()

    assert other.status(other.ask(asked()))[0] == "0"
    assert client.until(lambda event: isinstance(event, ConnectionTerminated)) is not None
    other.socket.close()


def taken(frames: Frames, data: bytes) -> list[Frame]:
    """All whole frames that are there when some bytes have come."""
    frames.add(data)
    return list(frames.split())


def test_frames_are_whole_wherever_they_are_cut() -> None:
    """A stream of frames in two pieces is that of one."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(
        1, [(":method", "POST"), (":path", "/"), (":scheme", "a"), (":authority", "x")]
    )
    client.send_data(1, b"abc" * 50)
    client.ping(b"12345678")
    data = client.data_to_send()
    whole = taken(Frames(16_384), data)

    assert b"".join(each.whole for each in whole) == data
    for cut in range(len(data)):
        frames = Frames(16_384)
        assert [*taken(frames, data[:cut]), *taken(frames, data[cut:])] == whole
    (_, long) = taken(Frames(10), data[:24] + b"\0\0\x0b\0\0\0\0\0\1ab")
    assert long.whole.endswith(b"ab")
    assert not long.is_plain


def test_frames_that_are_not_taken_are_there_later() -> None:
    """One after the other, whatever comes between."""
    data = bytes(24) + b"".join(b"\0\0\1\x50\0\0\0\0\0" + bytes([each]) for each in range(5))
    frames, found = Frames(16_384), []
    frames.add(data[:-3])
    for _ in range(6):
        found.append(next(frames.split()))
        frames.add(data[-3:] if len(found) == 2 else b"")

    assert b"".join(each.whole for each in found) == data
    assert not list(frames.split())


def test_calls_that_come_at_once_begin_in_rounds_of_their_own(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running stream is written between two of them: a loop does all that is ready before it
    looks at its sockets."""
    rounds: list[int] = []
    begun: list[int] = []

    def count(loop: asyncio.AbstractEventLoop) -> None:
        rounds.append(len(rounds))
        if len(rounds) < 10_000:
            loop.call_soon(count, loop)

    async def read(*given: Any) -> Any:
        if not rounds:
            count(asyncio.get_running_loop())
        begun.append(rounds[-1])
        return await generation_body(*given)

    monkeypatch.setattr(inference, "generation_body", read)
    _, client = raw()
    client.greet()
    with client.at_once():
        streams = [client.ask(asked()) for _ in range(6)]
    assert {client.status(stream)[0] for stream in streams} == {"0"}
    assert len(set(begun)) == 6
