"""Clients that take their answers slowly, or not at all: nothing is held for them without end."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from h2.events import DataReceived, StreamReset
from h2.settings import SettingCodes
from tests.router.http_server import Served
from tests.router.rpc.raw_client import RawClient, asked, framed, is_end
from tests.waiting import wait_for

from tandem.router.closing import MIN_DRAINED
from tandem.router.rpc import server
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.http2 import WINDOW, Connection

ABORT = "/tandem.v1.Inference/Abort"
LONG_ANSWER = asked(
    sampling=pb.SamplingParams(n=16, temperature=1.0, max_tokens=200, logprobs=10), request_id="it"
)
"""One message of some 100 KB."""
PERIOD = 0.05


class Clock:
    """The clock of all connections, which stands until it is told to go on.

    Whoever waits looks at it once in a period of real time, too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        self._looks: Counter[Any] = Counter()
        monkeypatch.setattr(Connection, "clock", lambda _: self._look())

    def _look(self) -> float:
        self._looks[asyncio.current_task()] += 1
        return self._now

    def go_on(self) -> None:
        """A period passes."""
        self._now += PERIOD

    def wait_seen(self, num_calls: int) -> None:
        """Until so many calls have looked, judged what moved, and wait again."""
        before = self._looks.copy()
        wait_for(lambda: sum(n >= before[task] + 6 for task, n in self._looks.items()) == num_calls)


def is_of(stream: int, *kinds: type[Any]) -> Callable[[Any], bool]:
    """Whether an event is one of the kinds, of a stream."""
    return lambda event: isinstance(event, kinds) and event.stream_id == stream


def num_calls(served: Served) -> int:
    """Calls that hold a place."""
    return sum(len(each.calls) for each in served.app.state.rpc._connections)


def test_abort_ends_a_call_whose_client_takes_nothing(raw: Any) -> None:
    """A message was cut short by the client's window, and so the stream is reset."""
    served, client = raw()
    client.greet(INITIAL_WINDOW_SIZE=10)
    stuck = client.ask(asked(request_id="stuck", stream=True))
    client.until(is_of(stuck, DataReceived), acknowledge=False)
    abort = client.ask(framed(pb.AbortRequest(request_id="stuck").SerializeToString()), path=ABORT)
    reset: Any = client.until(is_of(stuck, StreamReset), acknowledge=False)

    assert reset is not None
    assert client.status(abort) == ("0", "")
    assert pb.AbortResponse.FromString(client.data(abort)[5:]).aborted == 1
    wait_for(lambda: num_calls(served) == 0)


@pytest.mark.parametrize("method", ["Embed", "Generate"])
def test_an_answer_that_is_not_taken_is_given_up(raw: Any, method: str) -> None:
    """Whole or streamed, after the time for a write; its place is free, the connection goes on."""
    served, client = raw(write_timeout=0.3)
    client.greet(INITIAL_WINDOW_SIZE=10)
    embed = framed(pb.EmbedRequest(input=["Hi"] * 5).SerializeToString())
    body = asked(stream=True) if method == "Generate" else embed
    stuck = client.ask(body, path=f"/tandem.v1.Inference/{method}")
    reset: Any = client.until(is_end, acknowledge=False)

    assert isinstance(reset, StreamReset)
    assert reset.error_code == 8
    assert len(client.data(stuck)) == 10
    wait_for(lambda: num_calls(served) == 0)
    assert "tandem:router_requests_cancelled_total 1.0" in served.metrics()
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65_535})
    assert client.status(client.ask(asked())) == ("0", "")


def take(client: RawClient, num_bytes: int, stream: int, by: int | None) -> None:
    """Make room for so much more, of a stream or of the connection, and read it of the stream."""
    whole = len(client.data(stream)) + num_bytes
    client.h2.increment_flow_control_window(num_bytes, by)
    client.flush()
    client.until(lambda _: len(client.data(stream)) == whole, acknowledge=False)


def test_who_takes_a_little_in_time_is_waited_for(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part in each period is enough; less of it is not."""
    clock = Clock(monkeypatch)
    _, client = raw(write_timeout=PERIOD)
    client.greet(INITIAL_WINDOW_SIZE=10)
    client.h2.increment_flow_control_window(WINDOW)
    stream = client.ask(LONG_ANSWER)
    client.until(is_of(stream, DataReceived), acknowledge=False)
    for _ in range(3):
        take(client, MIN_DRAINED, stream, by=stream)
        clock.go_on()
        clock.wait_seen(1)
    take(client, MIN_DRAINED - 1, stream, by=stream)
    clock.go_on()
    assert isinstance(client.until(is_end, acknowledge=False), StreamReset)


@pytest.mark.parametrize("is_enough", [True, False])
def test_an_answer_behind_others_waits_for_them(
    raw: Any, monkeypatch: pytest.MonkeyPatch, is_enough: bool
) -> None:
    """The connection's window is all answers': what one takes of it, another is not blamed for."""
    clock = Clock(monkeypatch)
    _, client = raw(write_timeout=PERIOD)
    client.greet(INITIAL_WINDOW_SIZE=WINDOW)
    first = client.ask(LONG_ANSWER)
    client.until(lambda _: len(client.data(first)) == 65_535, acknowledge=False)
    second = client.ask(LONG_ANSWER)
    clock.wait_seen(2)
    take(client, MIN_DRAINED - (not is_enough), first, by=None)
    clock.go_on()
    if is_enough:
        clock.wait_seen(2)
        client.h2.increment_flow_control_window(WINDOW)
        client.flush()
        assert client.status(first) == client.status(second) == ("0", "")
        assert len(client.data(first)) == len(client.data(second)) > 80_000
    else:
        for stream in first, second:
            assert client.until(is_of(stream, StreamReset), acknowledge=False) is not None


def on_loop(connection: Connection, ask: Callable[[], Any]) -> Any:
    """Ask where the connection lives."""

    async def answer() -> Any:
        return ask()

    return asyncio.run_coroutine_threadsafe(answer(), connection._loop).result(20)


def test_no_time_passes_while_a_client_is_not_read(raw: Any) -> None:
    """What it makes room for is not heard meanwhile."""
    served, client = raw()
    client.greet()
    assert client.status(client.ask(asked())) == ("0", "")
    (connection,) = served.app.state.rpc._connections
    loop = connection._loop

    def lag() -> Any:
        return loop.time() - connection.clock()

    before = on_loop(connection, lag)
    on_loop(connection, connection.pause_writing)
    stands = on_loop(connection, connection.clock)
    wait_for(lambda: on_loop(connection, lag) > before + 0.01)
    assert on_loop(connection, connection.clock) == stands
    on_loop(connection, connection.resume_writing)
    assert on_loop(connection, lag) > before + 0.01


def unread(served: Served, port: int) -> tuple[RawClient, Connection]:
    """A client that does not read what was written for it, too little to be paused; and its end."""
    before = set(served.app.state.rpc._connections)
    client = RawClient(port, receive_buffer=4096).greet()
    assert client.status(client.ask(asked())) == ("0", "")
    now = set(served.app.state.rpc._connections)
    (connection,) = (each for each in now - before if each._last)
    transport = connection._transport
    wire = transport.get_extra_info("socket")
    on_loop(connection, lambda: wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096))
    while on_loop(connection, transport.get_write_buffer_size) < 32_768:
        for _ in range(100):
            client.h2.ping(b"12345678")
        client.flush()
    assert not connection.is_paused
    return client, connection


@pytest.mark.parametrize("ends", ["nonsense", "leave"])
def test_a_connection_that_ends_waits_for_no_reader(raw: Any, ends: str) -> None:
    """What it said last is not taken: its place is free after the time for a write."""
    served, other = raw(write_timeout=0.3)
    client, connection = unread(served, other.socket.getpeername()[1])
    if ends == "leave":
        on_loop(connection, connection.leave)
    else:
        client.socket.sendall(bytes.fromhex("00000408000000000000000000"))

    wait_for(lambda: connection not in served.app.state.rpc._connections)
    client.socket.close()


def test_a_connection_that_ends_makes_room_once(raw: Any) -> None:
    """Its place is taken until it is gone."""
    served, other = raw(max_connections=1, header_timeout=60.0)
    port = other.socket.getpeername()[1]
    wait_for(lambda: served.app.state.rpc._connections)
    other.socket.close()
    wait_for(lambda: not served.app.state.rpc._connections)
    client, connection = unread(served, port)
    on_loop(connection, connection.leave)
    late = RawClient(port)
    assert late.until(lambda _: False) is None
    late.socket.close()
    client.socket.close()
    wait_for(lambda: not served.app.state.rpc._connections)
    after = RawClient(port).greet()
    assert after.status(after.ask(asked())) == ("0", "")
    after.socket.close()


def test_connections_that_end_are_beyond_the_cap_for_a_few_alone(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new one has one that is idle leave, which goes when its last words are taken: where as
    many as may do so wait for that, the next goes at once."""
    monkeypatch.setattr(server, "SPARE_CONNECTIONS", 2)
    served, other = raw(max_connections=1, header_timeout=60.0, write_timeout=60.0)
    known, port = served.app.state.rpc._connections, other.socket.getpeername()[1]
    wait_for(lambda: known)
    other.socket.close()
    wait_for(lambda: not known)
    clients = [unread(served, port)[0] for _ in range(6)]
    wait_for(lambda: len(known) == 4, seen=lambda: len(known))
    for client in clients:
        client.socket.close()
