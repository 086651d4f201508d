"""A transport over no socket."""

from __future__ import annotations

import asyncio
from typing import Any


class Wire(asyncio.Transport):
    """A transport over no socket, which keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_ended = False
        self.is_read = True
        self.unsent = 0
        self.closed = asyncio.Event()

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def write(self, data: Any) -> None:
        if self.is_ended:
            raise RuntimeError("nothing is written after the end")
        self.written += data

    def write_eof(self) -> None:
        self.is_ended = True

    def get_write_buffer_size(self) -> int:
        """Return the bytes that a test has set."""
        return self.unsent

    def is_closing(self) -> bool:
        """Return whether either end has closed it."""
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True
        self.closed.set()

    abort = close
