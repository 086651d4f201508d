"""Events in a device's queue of work.

Waits poll with short sleeps, so they have a deadline and do not block other threads. On a CPU
everything is done at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.engine.step import FenceDone
from tandem.engine.threads import nap

WAIT_SECONDS = 600.0


class DeviceEvent(Protocol):
    """One event. Also a ``Fence``: all work queued before it has been written."""

    def done(self) -> bool:
        """Return whether the device is past it. Never blocks."""
        ...

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait until the device is past it. Raises TimeoutError."""
        ...


class _Past(FenceDone):
    """Event of a device without a queue, which is past every point."""

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Return at once."""


PAST: DeviceEvent = _Past()


class OnStream:
    """CUDA event on the current stream."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def hold_up(self, stream: Any) -> None:
        """Have later work on ``stream`` wait for this event."""
        stream.wait_event(self._event)

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        if self._event.query():
            return
        deadline = time.monotonic() + seconds
        while not self._event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device did not finish a step within {seconds:g} s")
            nap()


@dataclass(frozen=True, slots=True)
class Both:
    """Fence of two events."""

    one: DeviceEvent
    other: DeviceEvent

    def done(self) -> bool:
        return self.one.done() and self.other.done()


def moment(device: torch.device) -> DeviceEvent:
    """Return an event at the end of the queue of ``device``'s current stream."""
    return OnStream() if device.type == "cuda" else PAST
