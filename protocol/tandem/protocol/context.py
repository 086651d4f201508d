"""What a caller says of a request beside what an engine computes: for a client, for no worker."""

from __future__ import annotations

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
class Route:
    """The way through a fleet that a canary asks for, and the way that it went."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Goes with a request, as a value, from where it came in to ``EngineCoreClient.stream``."""

    arrived: float | None = None
    """When it came in, on the loop's (monotonic) clock; None takes the time of ``stream``."""
    route: Route | None = None
    """Of an operator's canary, which is counted apart; None for users."""
    tells_accepted: bool = False
    """Whether the caller wants an ``Accepted`` before the outputs, once the request waits in a
    queue or at a worker."""
    takes_partial: bool = False
    """Whether what there is at its deadline is an answer to its caller."""
    ended: list[int] | None = None
    """Choices that the caller has found at their end while workers would go on (a stop string),
    appended by the caller as it reads, taken off by the client; None where nobody looks."""


ORDINARY = RequestContext()
"""Of a user's request that has just come."""
