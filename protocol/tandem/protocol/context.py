"""Facts about a request that no worker receives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tandem.protocol.card import WorkerRole


class Shape(StrEnum):
    """Ways to serve a request."""

    DISAGGREGATED = "disaggregated"
    """Served by a prefill and a decode worker."""
    AGGREGATED = "aggregated"


@dataclass(slots=True)
class Route:
    """Route that a canary requests, and the route that was taken."""

    shape: Shape | None = None
    prefill_revision: str | None = None
    decode_revision: str | None = None
    served_shape: Shape | None = None
    """Shape of the attempt that emitted last; None before the first."""
    served_prefill: str = ""
    served_decode: str = ""

    def revision_of(self, role: WorkerRole) -> str | None:
        """Return the revision that a worker of ``role`` must have; None allows any."""
        return self.prefill_revision if role is WorkerRole.PREFILL else self.decode_revision


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Values passed along with a request from its arrival to ``EngineCoreClient.stream``."""

    arrived: float | None = None
    """Arrival time on the loop's clock. None: the time of ``stream``."""
    route: Route | None = None
    """Route of a canary; None for users."""
    tells_accepted: bool = False
    """Whether the caller expects an ``Accepted`` when the request waits."""
    takes_partial: bool = False
    """Whether the partial output at the deadline is an answer."""
    ended: list[int] | None = None
    """Choices that ended for the caller although workers would continue.

    The caller appends, the client removes. None if no client reads the list.
    """


ORDINARY = RequestContext()
"""Context of a user's request that arrived now."""
