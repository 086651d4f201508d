"""gRPC divides what it holds between tenants, and keeps their caches apart."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from tests import clear_text
from tests.own_ports import own_ports
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.rpc.raw_client import RawClient
from tests.router.rpc.test_rpc_connection import HEAD
from tests.router.rpc.test_rpc_floods import Greeted, Patient
from tests.waiting import wait_for

from tandem.router.rpc import call as call_module
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.call import MOST_UNREAD, Call
from tandem.router.rpc.errors import RpcError

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
Raw = Callable[..., tuple[Served, RawClient]]
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def message(data: bytes, size: int | None = None) -> bytes:
    """A message with what stands before it; ``size``: as if it had so many bytes."""
    return struct.pack(">BI", 0, len(data) if size is None else size) + data


def begin(both: Greeted, stream: int) -> Call:
    """A call that has begun."""
    both.client.send_headers(stream, HEAD)
    both.say()
    return both.begun[-1]


async def test_a_call_holds_few_unread_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are: each costs memory beyond its bytes."""
    monkeypatch.setattr(Patient, "max_message_bytes", 1 << 20)
    both = Greeted()
    call = begin(both, 1)
    call.feed(message(b"") * MOST_UNREAD)
    assert await call.receive() == b""
    call.feed(message(b"") * 2)
    with pytest.raises(RpcError, match="256 messages wait") as refused:
        await call.receive()
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.metadata == (("retry-after", "2"),)
    assert call._held.num_bytes == 0


async def test_messages_of_one_tenant_leave_room_for_another() -> None:
    """Its further messages are refused, and say what is held; all counts end at nothing."""
    both = Greeted()
    calls = [begin(both, 2 * at + 1) for at in range(12)]
    for each in calls[:-1]:
        each.belongs_to("hog")
        each.feed(message(bytes(900), 1_000))
    calls[-1].belongs_to("victim")
    calls[-1].feed(message(bytes(990)))
    assert await calls[-1].receive() == bytes(990)
    words = r"those of this client \d+; at most 10000"
    with pytest.raises(RpcError, match=words) as refused:
        await calls[-2].receive()
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    for each in calls:
        each.over()
    assert calls[0]._held.num_bytes == 0
    assert not calls[0]._held._by_tenant


async def test_a_message_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits between messages is not."""
    monkeypatch.setattr(call_module, "STALL_SECONDS", 0.05)
    both = Greeted()
    call = begin(both, 1)
    await call._arrived()  # nothing has begun
    call.feed(message(bytes(10), 100))
    with pytest.raises(RpcError, match="less than 4096 bytes of the message came") as refused:
        await call.receive()
    assert refused.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_each_message_of_reflection_takes_a_turn(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send hundreds at once: others have rounds of the loop between them."""
    served, client = raw()
    turns = served.app.state.router.turns
    take, taken = turns.take, []

    async def counted() -> None:
        taken.append(1)
        await take()

    monkeypatch.setattr(turns, "take", counted)
    asked = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    with client.greet().at_once():
        stream = client.ask(message(asked) * 100, REFLECT)
    client.until(partial(_ends, stream=stream))
    assert len(taken) == 100


def _ends(event: Any, *, stream: int) -> bool:
    return type(event).__name__ == "StreamEnded" and event.stream_id == stream


def test_tenants_find_none_of_each_others_prefixes(serve: Serve, decode: Make) -> None:
    """By gRPC neither, and one tenant is the same by both protocols."""
    worker = decode()
    (port,) = own_ports(1)
    served = serve(worker, grpc_port=port, api_key=("one", "two"), wait=False)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    client = RawClient(port).greet()
    sampling = pb.SamplingParams(max_tokens=1)
    request = pb.GenerateRequest(prompt="word " * 300, sampling=sampling).SerializeToString()
    for key in ("one", "two"):
        stream = client.ask(message(request), authorization=f"Bearer {key}")
        client.until(partial(_ends, stream=stream))
    body = {"prompt": "word " * 300, "max_tokens": 1}
    headers = {"Authorization": "Bearer one"}
    assert served.post("/v1/completions", json=body, headers=headers).status_code == 200
    one, two, http = worker.submitted
    assert one.block_hashes == http.block_hashes
    assert one.block_hashes
    assert not set(one.block_hashes) & set(two.block_hashes)
    assert one.tenant != two.tenant
    client.socket.close()
