"""Facts about a request that a client needs and no worker receives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tandem.protocol.card import WorkerRole


class Shape(StrEnum):
    """Ways to serve a request."""

    DISAGGREGATED = "disaggregated"
    """Served by a prefill and a decode worker."""
    AGGREGATED = "aggregated"
    """Served by one worker."""


@dataclass(slots=True)
class Route:
    """Route that a canary requests, and the route that was taken."""

    shape: Shape | None = None
    prefill_revision: str | None = None
    decode_revision: str | None = None
    served_shape: Shape | None = None
    """Shape of the attempt whose tokens were emitted last; None before the first."""
    served_prefill: str = ""
    """Revision of its prefill worker, if it had one."""
    served_decode: str = ""

    def revision_of(self, role: WorkerRole) -> str | None:
        """Return the revision that a worker of ``role`` must have; None allows any."""
        return self.prefill_revision if role is WorkerRole.PREFILL else self.decode_revision


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Values passed along with a request from its arrival to ``EngineCoreClient.stream``."""

    arrived: float | None = None
    """Arrival time on the loop's (monotonic) clock. None: the time of ``stream``."""
    route: Route | None = None
    """Route of an operator's canary, which is counted separately; None for users."""
    tells_accepted: bool = False
    """True if the caller expects an ``Accepted`` when the request waits in a queue or at a
    worker."""
    takes_partial: bool = False
    """True if the caller accepts the partial output at the deadline as an answer."""
    ended: list[int] | None = None
    """Choices that ended for the caller although workers would continue (a stop string). The caller
    appends them as it reads; the client removes them. None if no client reads the list."""


ORDINARY = RequestContext()
"""Context of a user's request that has just arrived."""
