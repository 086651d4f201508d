"""Start-time fair queueing: the order in which tenants use what they share.

The smallest tag first serves all waiting tenants at the same rate. Work of one tenant keeps its
order.
"""

from __future__ import annotations

_KEPT = 1_024
"""Maximum tenants; beyond it those without a debt are forgotten."""


class FairOrder:
    """The tags of one shared resource. Costs are integers of any unit."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}

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
        """Add cost that work had beyond the cost it entered with."""
        self._ends[tenant] = max(self._now, self._ends.get(tenant, 0)) + cost
