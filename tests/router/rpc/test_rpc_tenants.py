"""gRPC divides what it holds between tenants, and keeps their caches apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from tests import clear_text
from tests.own_ports import own_ports
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.rpc.raw_client import REFLECT, RawClient, asked, status_of
from tests.waiting import wait_for

from tandem.router.api.grpc import call as call_module
from tandem.router.api.grpc import server
from tandem.router.api.grpc import tandem_pb2 as pb
from tandem.router.http import held_bytes

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
Raw = Callable[..., tuple[Served, RawClient]]
Code = grpc.StatusCode
SIZE = 20_000
"""Bytes of the largest message."""
KEYS = ("hog", "victim")
LIST_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()


@pytest.fixture
def silent() -> Iterator[Iterator[bytes]]:
    """Requests that send nothing until the test ends."""
    end = threading.Event()

    class Silent(Iterator[bytes]):
        def __next__(self) -> bytes:
            end.wait(60)
            raise StopIteration

    yield Silent()
    end.set()


def key(name: str) -> dict[str, Any]:
    return {"authorization": f"Bearer {name}"}


def connected(serve: Serve, decode: Make, **settings: Any) -> tuple[Served, RawClient]:
    """A router with keys, and a client of it."""
    (port,) = own_ports(1)
    served = serve(decode(), grpc_port=port, api_key=KEYS, wait=False, **settings)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    return served, RawClient(port)


def test_calls_that_send_nothing_leave_room_for_another_tenant(
    serve: Serve, decode: Make, silent: Any
) -> None:
    """Each reserves the memory of the largest message; a tenant has twice what is free."""
    served, client = connected(serve, decode, max_body_bytes=SIZE, max_bodies_bytes=5 * SIZE)
    held = served.app.state.rpc.intake.held
    stalled = [client.start(requests=silent, **key("hog")) for _ in range(6)]
    wait_for(lambda: held.num_bytes == 3 * SIZE)
    wait_for(lambda: len(served.app.state.rpc._calls) == 6)

    assert held.num_bytes == 3 * SIZE
    assert client.status(asked(), **key("victim"))[0] is Code.OK
    for call in stalled:
        call.cancel()
    wait_for(lambda: held.num_bytes == 0)
    assert not held._by_tenant
    client.close()


def test_a_call_that_sends_nothing_makes_room_for_another_of_its_tenant(
    serve: Serve, decode: Make, silent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has stood still longest ends, and its status says why."""
    for module in (held_bytes, call_module):
        monkeypatch.setattr(module, "STILL_SECONDS", 0.05)
    served, client = connected(serve, decode, max_body_bytes=SIZE, max_bodies_bytes=SIZE)
    stalled = client.start(requests=silent, **key("hog"))
    wait_for(lambda: served.app.state.rpc.intake.held.num_bytes == SIZE)

    assert client.status(asked(), **key("hog"))[0] is Code.OK
    code, words = status_of(stalled)
    assert code is Code.UNAVAILABLE
    assert words.startswith("the router is full: requests that are being read hold")
    assert dict(stalled.trailing_metadata())["retry-after"] == "2"
    client.close()


def test_calls_that_come_at_once_wait_for_memory(raw: Raw) -> None:
    """None is refused, though there is memory for one message at a time."""
    served, client = raw(max_body_bytes=SIZE, max_bodies_bytes=SIZE)
    calls = [client.start(asked()) for _ in range(50)]
    assert {status_of(call)[0] for call in calls} == {Code.OK}
    assert served.app.state.rpc.intake.held.num_bytes == 0
    assert not served.app.state.rpc.intake._waiting


def test_a_message_that_does_not_arrive_ends_its_call(raw: Raw, silent: Any) -> None:
    """After the time that a body of HTTP has; so does a call that waits for memory."""
    _, client = raw(max_body_bytes=SIZE, max_bodies_bytes=SIZE, body_timeout=0.2)
    calls = [client.start(requests=silent) for _ in range(2)]
    for call in calls:
        code, words = status_of(call)
        assert code is Code.DEADLINE_EXCEEDED
        assert words == "the message did not arrive within 0.2 s"
    wait_for(lambda: client.status(asked())[0] is Code.OK)


def test_each_message_of_reflection_takes_a_turn(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send hundreds at once: others have rounds of the loop between them."""
    served, client = raw()
    turns = served.app.state.router.turns
    take, taken = turns.take, []

    async def counted() -> None:
        taken.append(1)
        await take()

    monkeypatch.setattr(turns, "take", counted)
    call = client.start(*[LIST_SERVICES] * server.MOST_REFLECTED, path=REFLECT)
    assert len(list(call)) == len(taken) == server.MOST_REFLECTED


def test_reflection_without_end_is_refused(raw: Raw) -> None:
    """A call has a number of messages, and the next call is answered."""
    _, client = raw()
    call = client.start(*[LIST_SERVICES] * (server.MOST_REFLECTED + 1), path=REFLECT)
    words = f"a call of reflection has at most {server.MOST_REFLECTED} messages"
    assert status_of(call) == (Code.RESOURCE_EXHAUSTED, words)
    assert client.status(LIST_SERVICES, path=REFLECT)[0] is Code.OK


def test_tenants_find_none_of_each_others_prefixes(serve: Serve, decode: Make) -> None:
    """One tenant is the same over gRPC and HTTP."""
    served, client = connected(serve, decode)
    sampling = pb.SamplingParams(max_tokens=1)
    request = pb.GenerateRequest(prompt="word " * 300, sampling=sampling).SerializeToString()
    for name in KEYS:
        assert client.status(request, **key(name))[0] is Code.OK
    body = {"prompt": "word " * 300, "max_tokens": 1}
    headers = {"Authorization": "Bearer hog"}
    assert served.post("/v1/completions", json=body, headers=headers).status_code == 200
    hog, victim, http = served.workers[0].submitted
    assert hog.block_hashes == http.block_hashes
    assert hog.block_hashes
    assert not set(hog.block_hashes) & set(victim.block_hashes)
    assert hog.tenant != victim.tenant
    client.close()
