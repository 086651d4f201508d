"""The end of a connection, over no socket."""

from __future__ import annotations

import asyncio

import pytest
from tests.router.app.wire import Wire

from tandem.router.http import closing
from tandem.router.http.closing import LINGER_BYTES, Closing


async def test_a_client_that_stays_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait begins when all that was written has gone."""
    monkeypatch.setattr(closing, "LINGER_SECONDS", 0.01)
    wire = Wire()
    wire.unsent = 1_000
    end = Closing(wire, 60.0)
    end.begin()
    assert wire.is_ended
    assert wire.is_read
    await asyncio.sleep(0.1)
    assert not wire.is_closed
    wire.unsent = 0
    async with asyncio.timeout(10):
        await wire.closed.wait()


async def test_a_client_that_sends_on_is_disconnected() -> None:
    """The bytes that are read and dropped are bounded."""
    wire = Wire()
    end = Closing(wire, 60.0)
    end.begin()
    for _ in range(LINGER_BYTES >> 16):
        end.count_read(1 << 16)
    assert not wire.is_closed
    end.count_read(1)
    assert wire.is_closed
    end.lost()


async def test_a_client_that_is_gone_is_not_waited_for() -> None:
    """Its connection has no half to close."""

    class Gone(Wire):
        def write_eof(self) -> None:
            raise OSError("not connected")

    wire = Gone()
    end = Closing(wire, 60.0)
    end.begin()
    assert wire.is_closed
    assert end._linger is None
