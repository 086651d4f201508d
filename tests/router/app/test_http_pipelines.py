"""Requests of HTTP that wait behind another on their connection: what they may take, and when."""

from __future__ import annotations

import asyncio

import pytest
from tests.router.app.test_http_connection import CHUNKED, SIZED, Connection

from tandem.router.http.guard import SPARE_CHUNKS

LARGE = b"POST /read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"


@pytest.mark.parametrize(
    "late",
    [LARGE + b"x" * 70_000, LARGE, b"GET /now HTTP/1.1\r\nHo"],
    ids=["a body that is not read", "a body", "a head"],
)
async def test_what_waits_has_its_time_when_its_turn_comes(late: bytes) -> None:
    """Until then it may be the router that reads nothing; the answers before it go on."""
    client = Connection(body_seconds=0.05, head_seconds=0.05, unwanted_seconds=0.05)
    await client.says(SIZED)
    await client.says(SIZED)
    await client.says(late)
    await asyncio.sleep(0.2)
    assert not client.wire.is_closed
    client.app.go.set()
    await client.says(b"")
    assert client.wire.written.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert client.wire.is_read
    async with asyncio.timeout(20):
        await client.wire.closed.wait()
    client.leaves()


async def test_chunks_of_answered_requests_count_no_more() -> None:
    """A client that always has one request wait may have any number of them."""
    client = Connection()
    small = CHUNKED + b"1\r\nx\r\n" * 100 + b"0\r\n\r\n"
    client.protocol.data_received(small)
    for _ in range(SPARE_CHUNKS // 20):
        client.protocol.data_received(small)
        assert not client.wire.is_ended
        assert client.protocol.pipeline
        for _ in range(100):  # until the one before it is answered, and it alone is left
            if client.protocol.pipeline:
                await asyncio.sleep(0)
        assert not client.protocol.pipeline
    client.leaves()
    await asyncio.sleep(0)
