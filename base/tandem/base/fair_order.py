"""Start-time fair queueing: the order in which tenants use what they share.

Each piece of work gets a start tag when it comes. A tenant's tags are as far apart as its work
costs, and begin no earlier than what was served last. So the smallest tag first serves all tenants
that wait at the same rate, however much each of them asks for. Work of one tenant keeps its order.
Used by the router (threads, admission, turns) and by an engine's scheduler.
"""

from __future__ import annotations

_KEPT = 1_024
"""Tenants beyond which those without a debt are forgotten."""


class FairOrder:
    """The tags of one shared resource. Costs are integers of any unit."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}
        """The tag that each tenant's next work gets, unless the queue is past it."""

    def enter(self, tenant: str, cost: int) -> int:
        """Return the start tag of work that comes now."""
        start = max(self._now, self._ends.get(tenant, 0))
        self._ends[tenant] = start + cost
        if len(self._ends) > _KEPT:
            self._ends = {each: end for each, end in self._ends.items() if end > self._now}
        return start

    def begin(self, start: int) -> None:
        """Advance the queue to the tag of work that begins now."""
        self._now = max(self._now, start)

    def charge(self, tenant: str, cost: int) -> None:
        """Add what work turned out to cost beyond what it entered with."""
        self._ends[tenant] = max(self._now, self._ends.get(tenant, 0)) + cost
