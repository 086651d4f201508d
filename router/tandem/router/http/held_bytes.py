"""Bytes of requests that are held in memory until they are parsed, by tenant.

A tenant may hold twice what is free, so that some is always free for other tenants. Without API
keys one client may hold all. A request that is still arriving, and stalls, ends in favour of
another one of its tenant that progresses. Used for bodies of HTTP and for messages of gRPC.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

STILL_SECONDS = 2.0
"""A request that brings less than ``PROGRESS_BYTES`` in this time is ended if another one needs its
bytes."""
PROGRESS_BYTES = 4_096
FREE_FACTOR = 2
"""Times the free bytes that a tenant may hold."""


class HeldBytes:
    """All requests of one protocol. Used in the loop's thread."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.num_bytes = 0
        """Bytes of all tenants."""
        self._clock = clock
        self._by_tenant: Counter[str] = Counter()
        self._coming: dict[Holding, Callable[[], None]] = {}
        """Callbacks that end each request that is still arriving, in the order of their last
        progress. They are kept here and not in the holding: the request would refer to itself after
        its end."""

    def enter(self, tenant: str, end: Callable[[], None]) -> Holding:
        """Return the holding of a request that begins to come; ``end`` is called if it has to make
        room for another one."""
        holding = Holding(tenant, self._clock())
        self._coming[holding] = end
        return holding

    def add(self, holding: Holding, num_bytes: int) -> bool:
        """Hold received bytes; return whether there was room for them. They count until they are
        released, in either case."""
        self._count(holding, num_bytes)
        moves = holding.progressed(num_bytes, self._clock())
        if moves and holding in self._coming:
            self._coming[holding] = self._coming.pop(holding)
        if not self._has_room(holding):
            self._make_room(holding)
        return self._has_room(holding)

    def came_whole(self, holding: Holding) -> None:
        """Note that all of it has come: it is not ended for another one."""
        self._coming.pop(holding, None)

    def let_go(self, holding: Holding, num_bytes: int | None = None) -> None:
        """Hold so many bytes less of a request; all of it, and nothing more, without a number."""
        if num_bytes is None:
            num_bytes = holding.num_bytes
            self._coming.pop(holding, None)
        self._count(holding, -num_bytes)

    def why_full(self, holding: Holding) -> str:
        """Return the words of a refusal."""
        own = self._by_tenant[holding.tenant]
        return (
            f"requests that are being read hold {self.num_bytes} bytes, those of this client "
            f"{own}; at most {self.most} are held for all"
        )

    def seconds_still(self, holding: Holding) -> float:
        """Return the seconds since a request made progress."""
        return self._clock() - holding.progress_at

    def _count(self, holding: Holding, num_bytes: int) -> None:
        holding.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._by_tenant[holding.tenant] += num_bytes
        if not self._by_tenant[holding.tenant]:
            del self._by_tenant[holding.tenant]

    def _has_room(self, holding: Holding) -> bool:
        """Return whether a request's received bytes may stay; a single request always may."""
        if holding.num_bytes == self.num_bytes:
            return True
        free = self.most - self.num_bytes
        if not holding.tenant:
            return free >= 0
        return self._by_tenant[holding.tenant] <= FREE_FACTOR * max(free, 0)

    def _make_room(self, holding: Holding) -> None:
        """End requests of the same tenant that stand still, until there is room."""
        for each, end in list(self._coming.items()):
            if self.seconds_still(each) < STILL_SECONDS or self._has_room(holding):
                return
            if each is not holding and each.tenant == holding.tenant and each.num_bytes:
                self.let_go(each)
                end()


class Holding:
    """The bytes of one request."""

    __slots__ = ("_fresh", "num_bytes", "progress_at", "tenant")

    def __init__(self, tenant: str, now: float) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self.progress_at = now
        """Time at which it last had brought ``PROGRESS_BYTES`` more."""
        self._fresh = 0

    def progressed(self, num_bytes: int, now: float) -> bool:
        """Count received bytes; return whether they are progress."""
        self._fresh += num_bytes
        if self._fresh < PROGRESS_BYTES:
            return False
        self._fresh, self.progress_at = 0, now
        return True
