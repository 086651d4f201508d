"""Deadlines of many keys, the nearest first. Pure: the caller brings the time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import RequestKey


class Timers:
    """A heap that forgets lazily: ``current`` says what a key's deadline is by now, if any."""

    def __init__(self, current: Callable[[RequestKey], Millis | None]) -> None:
        self._current = current
        self._heap: list[tuple[Millis, RequestKey]] = []

    def arm(self, key: RequestKey, deadline: Millis) -> None:
        """The key's deadline has changed to this."""
        heapq.heappush(self._heap, (deadline, key))

    def due(self, now: Millis) -> Iterator[RequestKey]:
        """Keys whose deadline has passed; each must get another deadline or be forgotten."""
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heapq.heappop(self._heap)
            if self._current(key) == deadline:
                yield key

    def next(self) -> Millis | None:
        """The nearest deadline."""
        while self._heap and self._current(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
