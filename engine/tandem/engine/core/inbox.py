"""What the step loop is told, and the bell that wakes it while it waits for a socket as well."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import Call, Cancel, PeerSet, Submit


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A message of a router for the step loop."""

    router: Incarnation
    message: Submit | Cancel | Call | PeerSet


@dataclass(frozen=True, slots=True)
class RouterFound:
    """A router greeted: it knows nothing of this worker yet."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The link to a router broke: nobody reads its requests' tokens any more."""

    router: Incarnation
    reason: str


Item = FromRouter | RouterFound | RouterLost | None
"""None only wakes the loop."""


class Inbox:
    """Any thread puts; the step loop alone takes. The bell rings only while somebody listens."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell)
        self._heard = False

    def put(self, item: Item) -> None:
        """Never blocks."""
        self._items.append(item)
        if self._heard:
            os.eventfd_write(self._bell, 1)

    def take(self) -> list[Item]:
        """All that has come, the oldest first."""
        items = []
        with suppress(IndexError):
            while True:
                items.append(self._items.popleft())
        return items

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._items

    @contextmanager
    def listening(self) -> Iterator[int]:
        """Within the block every ``put`` makes the descriptor that this gives readable."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._heard = True
        try:
            yield self._bell
        finally:
            self._heard = False
