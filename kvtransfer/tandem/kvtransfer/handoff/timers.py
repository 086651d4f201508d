"""Deadlines of many keys, the nearest first. Pure: the caller brings the time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import RequestKey

Current = Callable[[RequestKey], Millis | None]
"""Function that returns a key's current deadline, if it has one."""


class Timers:
    """A heap that forgets lazily: deadlines that are no longer a key's are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[Millis, RequestKey]] = []

    def arm(self, key: RequestKey, deadline: Millis) -> None:
        """Set the key's deadline."""
        heapq.heappush(self._heap, (deadline, key))

    def due(self, now: Millis, current: Current) -> list[RequestKey]:
        """Return keys whose deadline has passed; each must get another deadline or be forgotten."""
        keys: dict[RequestKey, None] = {}
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heapq.heappop(self._heap)
            if current(key) == deadline:
                keys[key] = None
        return list(keys)

    def next(self, current: Current) -> Millis | None:
        """Return the nearest deadline."""
        while self._heap and current(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
