"""A stream of events and its client: slow, gone, or never begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message, Send

from tandem.protocol.errors import (
    InvalidParameter,
)
from tandem.router.openai.answers.sse import ClientGone, EventStream


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
    stream = EventStream(events(), seconds=0.02, gone=lambda: gone.append(True))
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

    stream = EventStream(events(), seconds=1.0, gone=lambda: None)
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
    stream = EventStream(events(), seconds=1.0, gone=lambda: gone.append(True))
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

    stream = EventStream(events(), seconds=1.0, gone=lambda: None)
    scope = {"type": "http", "state": {"send_part": into(direct)}}
    await stream(scope, receive, into(by_layers))

    assert by_layers == [b"start", b"1", b""]
    assert direct == [b"2", b"3"]
