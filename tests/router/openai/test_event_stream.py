"""A stream of events and its client: slow, gone, or never begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Send

from tandem.protocol.errors import (
    InvalidParameter,
)
from tandem.router.api.openai.answers.sse import (
    AT_ONCE,
    COMMENT,
    ClientGone,
    EventStream,
    KeepAlives,
)

NONE = KeepAlives(0.0)


async def test_a_client_that_does_not_read() -> None:
    """Its stream is closed after a while, and so is what feeds it."""

    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    gone: list[bool] = []
    stream = EventStream(events(), seconds=0.02, gone=lambda: gone.append(True), keep_alives=NONE)
    await stream({"type": "http"}, receive, send)

    assert closed == [True]
    assert gone == [True]


async def test_an_error_before_the_first_event_decides_the_status() -> None:
    """Nothing is sent, and who called the stream learns of it."""
    sent: list[Message] = []

    async def events() -> AsyncGenerator[bytes, None]:
        raise InvalidParameter("prompt", "", "a text")
        yield b""

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def send(message: Message) -> None:
        sent.append(message)

    stream = EventStream(events(), seconds=1.0, gone=lambda: None, keep_alives=NONE)
    with pytest.raises(InvalidParameter):
        await stream({"type": "http"}, receive, send)
    assert sent == []


async def test_a_client_that_leaves_before_the_first_event_is_told_of_by_an_error() -> None:
    """The work ends at once; whoever gives errors their status counts it, not the stream."""
    ended: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        yield b""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there")

    gone: list[bool] = []
    stream = EventStream(events(), seconds=1.0, gone=lambda: gone.append(True), keep_alives=NONE)
    with pytest.raises(ClientGone):
        await stream({"type": "http"}, receive, send)
    assert ended == [True]
    assert gone == []


async def test_what_is_in_mid_stream_passes_no_layer() -> None:
    """Layers see how an answer begins and ends; the parts between go to the server at once."""
    by_layers: list[bytes] = []
    direct: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for each in (b"1", b"2", b"3"):
            yield each

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    def into(told: list[bytes]) -> Send:
        async def send(message: Message) -> None:
            told.append(message.get("body", b"start"))

        return send

    stream = EventStream(events(), seconds=1.0, gone=lambda: None, keep_alives=NONE)
    scope = {"type": "http", "state": {"send_part": into(direct)}}
    await stream(scope, receive, into(by_layers))

    assert by_layers == [b"start", b"1", b""]
    assert direct == [b"2", b"3"]


class Connection:
    """A client that reads until it is told not to; ``sent`` is what the server wrote."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._news = asyncio.Event()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message.get("body", b"start"))
        self._news.set()

    async def until(self, last: list[bytes]) -> None:
        """Until this is what was written last."""
        while self.sent[-len(last) :] != last:
            self._news.clear()
            await self._news.wait()


async def test_a_silent_stream_gets_comments_before_and_between_its_events() -> None:
    keep_alives, client, go_on = KeepAlives(0.01), Connection(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        for each in (b"1", b"2", b"3"):
            yield each
            await go_on.wait()
            go_on.clear()

    stream = EventStream(events(), seconds=60.0, gone=lambda: None, keep_alives=keep_alives)
    running = asyncio.create_task(stream({"type": "http"}, client.receive, client.send))
    await client.until([b"start", b"1", COMMENT, COMMENT])
    go_on.set()
    await client.until([b"2", COMMENT, COMMENT])
    go_on.set()
    await client.until([b"3"])
    go_on.set()
    await running
    whole = list(client.sent)
    assert whole[-1] == b""
    keep_alives._begin()
    assert client.sent == whole


async def test_a_client_that_does_not_read_gets_no_comments() -> None:
    """Nothing collects for it, and when it reads on it gets what is its answer."""
    client, go_on = Connection(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"1"
        await go_on.wait()
        yield b"2"

    stream = EventStream(events(), seconds=60.0, gone=lambda: None, keep_alives=KeepAlives(60.0))
    running = asyncio.create_task(stream({"type": "http"}, client.receive, client.send))
    await client.until([b"1"])
    client.reads.clear()
    for _ in range(100):
        stream.keep_alive()
    go_on.set()
    await asyncio.sleep(0)
    for _ in range(100):
        stream.keep_alive()
    client.reads.set()
    await running

    assert client.sent == [b"start", b"1", b"2", b""]


async def test_one_timer_calls_every_stream_some_in_each_round() -> None:
    """A loop with thousands of silent streams has tokens of others to send, too."""
    keep_alives = KeepAlives(0.01)
    called: list[int] = []
    rounds: list[int] = []

    class Silent:
        def __init__(self, number: int) -> None:
            self.number = number

        def keep_alive(self) -> None:
            called.append(self.number)
            keep_alives.discard(self)

    async def count_rounds() -> None:
        while len(called) < 4 * AT_ONCE + 1:
            before = len(called)
            await asyncio.sleep(0)
            rounds.append(len(called) - before)

    for number in range(4 * AT_ONCE + 1):
        keep_alives.add(Silent(number))
    await count_rounds()

    assert called == list(range(4 * AT_ONCE + 1))
    assert max(rounds) <= AT_ONCE
    assert keep_alives._timer is None


async def test_no_stream_is_kept_alive_if_that_is_off() -> None:
    keep_alives = KeepAlives(0.0)

    class Silent:
        def keep_alive(self) -> None:
            raise AssertionError("never")

    keep_alives.add(Silent())

    assert not keep_alives.are_sent
    assert keep_alives._timer is None
