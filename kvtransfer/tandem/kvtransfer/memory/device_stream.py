"""A GPU stream, next to the engine's steps, on which slots are packed and unpacked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

LOOK_SECONDS = 0.001


class DeviceStream:
    """See ``device_slots.Stream``; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue the calls of the block on this stream."""
        with torch.cuda.device(self._device):  # torch's own block of a stream asks for it thrice
            before = torch.cuda.current_stream(self._device)
            torch.cuda.set_stream(self._stream)
            try:
                yield
            finally:
                torch.cuda.set_stream(before)

    def mark(self) -> _Mark:
        """Return a move that is done when all queued work is."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Mark(event)

    def wait(self, seconds: float | None = None) -> bool:
        """See Stream; a stream's own waiting has no deadline."""
        if seconds is None:
            self._stream.synchronize()
            return True
        mark, end = self.mark(), time.monotonic() + seconds
        while not mark.done():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return True


class _Mark:
    """An event after the queued work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """Return whether the device has reached the event. Raises the device's error."""
        return bool(self._event.query())
