"""Points in a device's queue of work: whether it has got there, and waiting until it has.

Waiting is asking again and again with short sleeps: it has a deadline, and other threads of the
process run meanwhile. On a CPU everything is done when it returns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.engine.naps import nap
from tandem.engine.step import FenceDone

WAIT_SECONDS = 600.0
"""A device that has not got there by then hangs."""


class Moment(Protocol):
    """One point. Also a ``Fence``: all that was queued before it has landed."""

    def done(self) -> bool:
        """Whether the device is past it. Never blocks."""
        ...

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Return when the device is past it. Raises TimeoutError."""
        ...


class _Past(FenceDone):
    """A device without a queue is past every point."""

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Nothing to wait for."""


PAST: Moment = _Past()


class OnStream:
    """A CUDA event on the current stream."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """See Moment."""
        return bool(self._event.query())

    def hold_up(self, stream: Any) -> None:
        """Have what is queued on ``stream`` from now on begin behind this."""
        stream.wait_event(self._event)

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """See Moment."""
        if self._event.query():
            return
        deadline = time.monotonic() + seconds
        while not self._event.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device did not finish a step within {seconds:g} s")
            nap()


@dataclass(frozen=True, slots=True)
class Both:
    """A Fence behind two points."""

    one: Moment
    other: Moment

    def done(self) -> bool:
        """See Fence."""
        return self.one.done() and self.other.done()


def moment(device: torch.device) -> Moment:
    """Now, in the queue of ``device``'s current stream."""
    return OnStream() if device.type == "cuda" else PAST
