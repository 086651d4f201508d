"""What a request brings to the dispatcher beside its body: when it came, and a canary's wishes.

Set by middleware for the task of one HTTP request; read where the dispatcher opens the request.
Ordinary requests have no wishes.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from tandem.protocol.card import WorkerRole


class Shape(StrEnum):
    """How a request is served."""

    DISAGGREGATED = "disaggregated"
    """By a prefill and a decode worker."""
    AGGREGATED = "aggregated"
    """By one worker."""


@dataclass(slots=True)
class Routing:
    """Wishes of one canary, and what came of them."""

    shape: Shape | None = None
    prefill_revision: str | None = None
    decode_revision: str | None = None
    served_shape: Shape | None = None
    """Of the attempt whose tokens were emitted last; None before the first."""
    served_prefill: str = ""
    """Revision of its prefill worker, if it had one."""
    served_decode: str = ""

    def revision_of(self, role: WorkerRole) -> str | None:
        """The one revision of a role that may serve it."""
        return self.prefill_revision if role is WorkerRole.PREFILL else self.decode_revision


arrived: ContextVar[float | None] = ContextVar("arrived", default=None)
"""When the request's head was read, on the monotonic clock (the loop's); None outside HTTP."""

current: ContextVar[Routing | None] = ContextVar("routing", default=None)
"""Of the request that this task answers."""
