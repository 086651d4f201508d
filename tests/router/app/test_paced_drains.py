"""What a client sends after its end goes nowhere, and is read slowly: it keeps nobody waiting."""

from __future__ import annotations

import asyncio

import pytest

from tandem.router.http import closing
from tandem.router.http.closing import PACED_BYTES, Closing


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_read, self.is_closed = True, False
        self.pauses = 0
        self.resumed = asyncio.Event()

    def pause_reading(self) -> None:
        self.is_read = False
        self.resumed.clear()
        self.pauses += 1

    def resume_reading(self) -> None:
        self.is_read = True
        self.resumed.set()

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write_eof(self) -> None:
        """The sending half is closed."""

    def get_write_buffer_size(self) -> int:
        return 0


async def test_large_parts_are_read_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones at once; a client that sends too much is cut off."""
    monkeypatch.setattr(closing, "DRAIN_RATE", 100 * PACED_BYTES)
    wire = Wire()
    end = Closing(wire, 30.0)
    end.begin(60.0, 3 * PACED_BYTES)
    end.count_read(PACED_BYTES - 1)
    assert wire.is_read
    end.count_read(PACED_BYTES)
    assert not wire.is_read
    async with asyncio.timeout(30):
        await wire.resumed.wait()
    end.count_read(2 * PACED_BYTES)
    assert wire.is_closed
    assert wire.pauses == 1
    end.lost()
