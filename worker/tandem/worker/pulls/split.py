"""Events of one service, split into those of hand-offs and those of pulled prefixes.

A worker's links are the same for both, and so are their threads. The key of an event decides which
connector gets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from tandem.protocol.ids import RequestKey


class _Keyed(Protocol):
    @property
    def key(self) -> RequestKey:
        """Return the key of the hand-off or pull."""
        ...


Event = TypeVar("Event", bound=_Keyed)


class SplitEvents(Generic[Event]):
    """Splitter of a service's ``poll`` for two callers in one thread."""

    def __init__(self, poll: Callable[[], Iterable[Event]]) -> None:
        self._poll = poll
        self._of_pulls: deque[Event] = deque()
        self._of_handoffs: deque[Event] = deque()

    def of_pulls(self) -> list[Event]:
        """Return the new events of keys that ``RequestKey.for_pull`` made."""
        return self._taken(self._of_pulls)

    def of_handoffs(self) -> list[Event]:
        """Return the new events of all other keys."""
        return self._taken(self._of_handoffs)

    def _taken(self, queue: deque[Event]) -> list[Event]:
        for event in self._poll():
            (self._of_pulls if event.key.is_pull else self._of_handoffs).append(event)
        found = list(queue)
        queue.clear()
        return found
