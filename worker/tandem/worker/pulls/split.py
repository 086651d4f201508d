"""One service's events, told apart: those of hand-offs and those of pulled prefixes.

A worker's links are the same for both, and so are the threads behind them; by the key each event
is for the connector that asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from tandem.protocol.ids import RequestKey


class _Keyed(Protocol):
    @property
    def key(self) -> RequestKey:
        """Of the hand-off or pull."""
        ...


Event = TypeVar("Event", bound=_Keyed)


class SplitEvents(Generic[Event]):
    """``poll`` of a service for two callers in one thread."""

    def __init__(self, poll: Callable[[], Iterable[Event]]) -> None:
        self._poll = poll
        self._of_pulls: deque[Event] = deque()
        self._of_handoffs: deque[Event] = deque()

    def of_pulls(self) -> list[Event]:
        """What happened since to keys that ``RequestKey.for_pull`` made."""
        return self._taken(self._of_pulls)

    def of_handoffs(self) -> list[Event]:
        """What happened since to all others."""
        return self._taken(self._of_handoffs)

    def _taken(self, queue: deque[Event]) -> list[Event]:
        for event in self._poll():
            (self._of_pulls if event.key.is_pull else self._of_handoffs).append(event)
        found = list(queue)
        queue.clear()
        return found
