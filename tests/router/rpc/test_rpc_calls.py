"""Calls of any client: what each method takes, how many run, and how they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tests.router.fake_worker import Behaviour, FakeWorker, Turn, serve_well
from tests.router.http_server import ANSWER
from tests.router.rpc.raw_client import SERVICE, RawClient, asked, status_of, texts
from tests.router.rpc.test_rpc import hold
from tests.waiting import wait_for

from tandem.router.api.grpc import inference
from tandem.router.api.grpc import tandem_pb2 as pb
from tandem.router.api.grpc.inference import generation_body

Make = Callable[..., FakeWorker]
Code = grpc.StatusCode
LONG = asked(sampling=pb.SamplingParams(max_tokens=200), stream=True)


def held_until(go: threading.Event) -> Behaviour:
    """Return a worker's behaviour that begins its answers then."""

    def behave(turn: Turn) -> Iterator[float]:
        while not go.is_set():
            yield 0.01
        yield from serve_well(turn)

    return behave


@pytest.mark.parametrize(
    ("messages", "given", "code", "words"),
    [
        ([asked()], {"path": SERVICE + "Nothing"}, Code.UNIMPLEMENTED, "no method"),
        ([asked()], {"compression": grpc.Compression.Gzip}, Code.UNIMPLEMENTED, "gzip"),
        ([b"\xff\xff"], {}, Code.INVALID_ARGUMENT, "type"),
        ([], {}, Code.INVALID_ARGUMENT, "one message"),
        ([asked(), asked()], {}, Code.INVALID_ARGUMENT, "one message"),
        ([b"a" * 20_000], {}, Code.RESOURCE_EXHAUSTED, "10000"),
        ([asked()], {"a": "b" * 5_000}, Code.RESOURCE_EXHAUSTED, "metadata"),
    ],
)
def test_a_call_that_no_method_takes_is_refused(
    raw: Any, messages: list[bytes], given: Any, code: Code, words: str
) -> None:
    """Its status names the reason, and the next call is answered."""
    _, client = raw(max_body_bytes=10_000, max_header_bytes=2_048)
    found, message = client.status(*messages, **given)

    assert (found, words in message) == (code, True), message
    assert client.status(asked())[0] is Code.OK


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
    sampling = pb.SamplingParams()
    sampling.vllm_xargs[name].values.add()
    call = client.start(asked(sampling=sampling))

    assert status_of(call)[0] is Code.INVALID_ARGUMENT
    assert dict(call.trailing_metadata())["tandem-error-param"] == f"vllm_xargs.{told}"


def test_calls_beyond_the_bound_are_refused_and_cost_no_other(raw: Any, decode: Make) -> None:
    """Those that run are answered, and their places are free afterwards."""
    go = threading.Event()
    worker = decode(behaviour=held_until(go))
    served, client = raw(worker, max_connections=2)
    other = RawClient(client.port)
    older = [each.start(LONG) for each in (client, other)]
    wait_for(lambda: len(worker.submitted) == 2)
    assert client.status(asked())[0] is Code.RESOURCE_EXHAUSTED
    go.set()

    assert [texts(each) for each in older] == [ANSWER, ANSWER]
    wait_for(lambda: client.status(asked())[0] is Code.OK)
    assert not served.app.state.rpc._calls
    other.close()


def test_a_connections_calls_beyond_its_bound_wait(raw: Any) -> None:
    """Its client begins them when others have ended."""
    _, client = raw(max_connections_per_client=1)
    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(client.status, [asked()] * 5))
    assert {code for code, _ in found} == {Code.OK}


def test_calls_given_up_as_they_begin_cost_no_other(raw: Any, decode: Make) -> None:
    """Each is gone, and the call next to them is answered."""
    go = threading.Event()
    worker = decode(behaviour=held_until(go))
    served, client = raw(worker)
    older = client.start(LONG)
    wait_for(lambda: worker.submitted)
    for _ in range(100):
        client.start(LONG).cancel()
    go.set()

    assert texts(older) == ANSWER
    wait_for(lambda: not served.app.state.rpc._calls)
    assert served.app.state.rpc.intake.held.num_bytes == 0


def test_calls_of_a_connection_that_ends_are_given_up(raw: Any, decode: Make) -> None:
    """Their workers stop, and they are counted as cancelled."""
    worker = decode(behaviour=hold)
    served, client = raw(worker)
    call = client.start(asked(stream=True))
    wait_for(lambda: worker.submitted)
    client.close()

    wait_for(lambda: worker.cancelled)
    wait_for(lambda: "tandem:router_requests_cancelled_total 1.0" in served.metrics())
    assert not call.is_active()


def test_a_call_that_is_not_finished_in_the_drain_time_is_unavailable(
    raw: Any, decode: Make
) -> None:
    """Its status says that the server is shutting down."""
    worker = decode(behaviour=hold)
    served, client = raw(worker, drain_timeout=0.2)
    call = client.start(asked(stream=True))
    wait_for(lambda: worker.submitted)
    served.stop()

    assert status_of(call) == (Code.UNAVAILABLE, "the server is shutting down")


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
    calls = [client.start(asked()) for _ in range(6)]
    assert {status_of(call)[0] for call in calls} == {Code.OK}
    assert len(set(begun)) == 6


def test_a_port_that_is_taken_ends_the_start(raw: Any, decode: Make) -> None:
    """Two routers do not share it."""
    served, client = raw()
    config = served.app.state.router.config
    make = type(served.app.state.rpc)
    second = make(served.app.state.service, config, None, served.app.state.router.turns)

    async def start() -> None:
        with pytest.raises(OSError, match=f"gRPC cannot listen on 127.0.0.1:{client.port}"):
            await second.start()

    asyncio.run(start())
    assert RawClient(client.port).status(asked())[0] is Code.OK


def test_a_process_that_the_router_starts_ends_no_call(raw: Any, decode: Make) -> None:
    """A template of a request runs in a process of its own, while a call of gRPC runs."""
    go = threading.Event()
    worker = decode(behaviour=held_until(go))
    served, client = raw(worker, trust_request_chat_template=True)
    call = client.start(LONG)
    wait_for(lambda: worker.submitted)
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "chat_template": "{{ messages[0].content }}"}
    answer = served.post("/tokenize", json=body)

    assert answer.status_code == 200, answer.text
    go.set()
    assert texts(call) == ANSWER
