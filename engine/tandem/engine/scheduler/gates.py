"""What a request may have to wait for or hold: one small object per scarce or slow thing.

A grammar that compiles, an adapter slot, an encoder budget. The plan loop asks all gates and
knows none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tandem.engine.request import Request


class Gate(Protocol):
    """Called by the scheduler in its step loop; never blocks."""

    def ready(self, request: Request) -> bool:
        """Whether the thing the request waits for is there."""
        ...

    def can_reserve(self, request: Request, num_tokens: int) -> bool:
        """Whether ``num_tokens`` of the request may run in this step."""
        ...

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Take what ``can_reserve`` promised; once per step and request."""
        ...

    def release(self, request: Request) -> None:
        """The request ended or was preempted; give everything back."""
        ...
