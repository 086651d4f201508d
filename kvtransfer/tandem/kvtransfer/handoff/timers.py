"""Deadlines of many keys, the nearest first. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import RequestKey


class Age:
    """A number per key, assigned when the key is first seen and kept until it is forgotten."""

    def __init__(self) -> None:
        self._numbers: dict[RequestKey, int] = {}
        self._next = 0

    def note(self, key: RequestKey) -> None:
        """Add a key as the youngest, unless it is known."""
        if key not in self._numbers:
            self._numbers[key] = self._next
            self._next += 1

    def forget(self, key: RequestKey) -> None:
        self._numbers.pop(key, None)

    def order(self, keys: Iterable[RequestKey]) -> list[RequestKey]:
        return sorted(keys, key=self._numbers.__getitem__)

    def copy(self) -> Age:
        other = Age()
        other._numbers = dict(self._numbers)
        other._next = self._next
        return other


Current = Callable[[RequestKey], Millis | None]
"""Function that returns a key's current deadline, if it has one."""


class Timers:
    """Heap of deadlines; replaced ones are skipped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[Millis, RequestKey]] = []

    def arm(self, key: RequestKey, deadline: Millis) -> None:
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
        while self._heap and current(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
