"""Messages of gRPC before they are bodies: how much they hold, and what they say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from tests.router.fake_worker import FakeWorker
from tests.router.rpc.raw_client import asked
from tests.router.rpc.test_rpc import hold
from tests.waiting import wait_for

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.grpc import inference, server
from tandem.router.api.grpc import tandem_pb2 as pb
from tandem.router.api.grpc.server import check_values, may_exceed
from tandem.router.api.openai.bodies.bounds import understand
from tandem.router.http.errors import HttpProblem

MOST = 1_000
GENERATE: Any = pb.GenerateRequest
CHAT: Any = pb.Chat
IDS = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 300, 70_000] * 300))
"""Two values and 900."""


def texts(count: int) -> bytes:
    return pb.EmbedRequest(input=[""] * count).SerializeToString()


def chat(count: int) -> bytes:
    """A request of so many empty messages: two bytes for each."""
    messages = [pb.Message() for _ in range(count)]
    return pb.GenerateRequest(chat=pb.Chat(messages=messages)).SerializeToString()


def biased(count: int) -> bytes:
    """A request with so many entries of a map."""
    sampling = pb.SamplingParams(logit_bias=dict.fromkeys(range(count), 1.0))
    return pb.GenerateRequest(sampling=sampling).SerializeToString()


def with_extras(count: int) -> bytes:
    """A request with a list of so many numbers for a logits processor."""
    sampling = pb.SamplingParams()
    extra = sampling.vllm_xargs["a"]
    extra.is_list = True
    for each in range(count):
        extra.values.add(integer=each)
    return pb.GenerateRequest(sampling=sampling).SerializeToString()


@pytest.mark.parametrize(
    ("kind", "fits", "is_too_much"),
    [
        (pb.EmbedRequest, texts(MOST), texts(MOST + 1)),
        (pb.GenerateRequest, chat(99), chat(100)),  # the chat is a message itself
        (pb.GenerateRequest, biased(99), biased(100)),
        (pb.GenerateRequest, IDS.SerializeToString(), IDS.SerializeToString() * 2),
    ],
)
def test_values_are_counted_before_a_message_is_parsed(
    kind: Any, fits: bytes, is_too_much: bytes
) -> None:
    """Entries, numbers that come packed, and messages, which cost more."""
    check_values(fits, kind.DESCRIPTOR, MOST)
    with pytest.raises(HttpProblem, match="holds more than") as caught:
        check_values(is_too_much, kind.DESCRIPTOR, MOST)
    assert caught.value.answer.status == 413


@pytest.mark.parametrize(
    "data", [b"\x0a\x05ab", b"\x0a", b"\x80", b"\x80" * 11 + b"\0", b"\x0b\x0c", b"\x2a\x01\x0a"]
)
def test_what_is_no_message_is_not_counted(data: bytes) -> None:
    """Else what the parser takes for something else would be beyond the count."""
    with pytest.raises(DecodeError):
        check_values(data, GENERATE.DESCRIPTOR, MOST)


def extra(value: float) -> pb.SamplingParams:
    """Parameters with such a number for a logits processor."""
    params = pb.SamplingParams()
    params.vllm_xargs["a"].values.add(number=value)
    return params


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("temperature", lambda value: pb.SamplingParams(temperature=value)),
        ("logit_bias.7", lambda value: pb.SamplingParams(logit_bias={7: value})),
        ("vllm_xargs.a", extra),
    ],
)
def test_numbers_that_are_none_are_refused(
    name: str, make: Callable[[float], pb.SamplingParams], value: float
) -> None:
    """JSON has no word for them: the default would be taken."""
    assert inference._sampling(make(0.5))
    with pytest.raises(InvalidParameter, match="a finite number") as caught:
        inference._sampling(make(value))
    assert caught.value.param == name


def test_a_message_that_holds_too_much_is_not_read(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused as a body of HTTP is, and nothing of it stays."""

    def unwanted(_: Any) -> Any:
        raise AssertionError("the chat was made into objects")

    monkeypatch.setattr(inference, "_messages", unwanted)
    served, client = raw(max_json_values=MOST)
    status, words = client.status(chat(300))

    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "holds more than 100 objects" in words
    assert client.status(asked())[0] is grpc.StatusCode.OK
    wait_for(lambda: served.app.state.rpc.intake.held.num_bytes == 0)


@pytest.mark.parametrize(
    ("message", "is_beside"),
    [
        (chat(3_900), True),
        (chat(30), False),
        (biased(600), True),
        (with_extras(1_500), True),
        (with_extras(20), False),
        (pb.GenerateRequest(prompt="x" * 7_000).SerializeToString(), False),
    ],
)
def test_few_bytes_of_many_messages_are_read_in_a_thread(
    raw: Any, monkeypatch: pytest.MonkeyPatch, message: bytes, is_beside: bool
) -> None:
    """By what they hold: they take as long as forty times as many bytes of text. Nobody counts what
    cannot be too much."""
    threads: list[str] = []

    def noted(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encoded(*given)

    def unwanted(*_: Any) -> None:
        raise AssertionError("there are too few bytes for too much")

    encoded = inference._encoded
    monkeypatch.setattr(inference, "_encoded", noted)
    monkeypatch.setattr(server, "check_values", unwanted)
    _, client = raw()
    client.status(message)

    assert [each.startswith("beside") for each in threads] == [is_beside]


@pytest.mark.parametrize(("most", "is_beside"), [(1_000, False), (10_000, True)])
def test_what_is_counted_of_few_bytes_is_counted_in_a_thread(
    raw: Any, monkeypatch: pytest.MonkeyPatch, most: int, is_beside: bool
) -> None:
    """It takes forty times as long as to parse them."""
    threads: list[str] = []

    def noted(*given: Any) -> None:
        threads.append(threading.current_thread().name)

    monkeypatch.setattr(server, "check_values", noted)
    _, client = raw(max_json_values=most)
    client.status(chat(most // 10 + 1))

    assert [each.startswith("beside") for each in threads] == [is_beside]


def test_nobody_counts_what_cannot_be_too_much() -> None:
    """A value takes a byte at least, and a message two: with less, all is within the bound."""
    fewest = MOST // 10 * 2 + 1
    assert (may_exceed(fewest, MOST), may_exceed(fewest + 1, MOST)) == (False, True)
    check_values(b"\x0a\0" * (fewest // 2), CHAT.DESCRIPTOR, MOST)


def test_a_message_is_held_until_it_is_understood(
    raw: Any, decode: Callable[..., FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes count beside those that still come, and no longer while it is answered."""
    held: list[int] = []

    def noted(*given: Any) -> Any:
        held.append(served.app.state.rpc.intake.held.num_bytes)
        return understand(*given)

    monkeypatch.setattr(inference, "understand", noted)
    worker = decode(behaviour=hold)
    served, client = raw(worker)
    call = client.start(asked())
    wait_for(lambda: worker.submitted)

    assert held == [len(asked())]
    assert served.app.state.rpc.intake.held.num_bytes == 0
    call.cancel()
