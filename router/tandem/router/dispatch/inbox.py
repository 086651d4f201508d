"""What workers said and no client has read yet: bounded in bytes, of one request and of all.

A client that does not read stops the request's own task, not its workers. What they go on to say
waits here, up to a limit; beyond it the answer is given up, so that one client's stillness never
costs the router's memory. Estimates of sizes are good enough for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tandem.protocol.outputs import EngineCoreOutput, PooledOutput
from tandem.router.workers.seams import LegEvent

_EVENT_BYTES = 400
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 120

_Leg = TypeVar("_Leg")


def weigh(event: LegEvent) -> int:
    """About how many bytes of memory an event takes."""
    if type(event) is PooledOutput:
        return _EVENT_BYTES + len(event.values)
    if type(event) is not EngineCoreOutput:
        return _EVENT_BYTES
    size = _EVENT_BYTES + _TOKEN_BYTES * len(event.token_ids)
    for logprobs in (event.logprobs, event.prompt_logprobs):
        if logprobs:
            last = logprobs[-1]
            each = 1 if last is None else 1 + len(last.top_ids)
            size += _LOGPROB_BYTES * each * len(logprobs)
    return size


class Backlog:
    """All inboxes of a router."""

    def __init__(self, *, stream_bytes: int = 4 << 20, total_bytes: int = 256 << 20) -> None:
        self.stream_bytes = stream_bytes
        self.total_bytes = total_bytes
        self.held = 0
        """Bytes in all of them."""
        self._inboxes: set[Inbox[object]] = set()

    def enter(self, inbox: Inbox[object]) -> None:
        """An inbox holds something."""
        self._inboxes.add(inbox)

    def leave(self, inbox: Inbox[object]) -> None:
        """An inbox is empty."""
        self._inboxes.discard(inbox)

    def largest(self) -> Inbox[object]:
        """Who holds most; somebody does."""
        return max(self._inboxes, key=lambda inbox: inbox.held)


class Inbox(Generic[_Leg]):
    """Of one attempt; read in the order of arrival."""

    def __init__(self, backlog: Backlog, overflow: Callable[[], None]) -> None:
        """``overflow`` is called when too much waits; it should ``clear``."""
        self.held = 0
        """Bytes that wait."""
        self.overflow = overflow
        self._backlog = backlog
        self._items: deque[tuple[int, _Leg, LegEvent]] = deque()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._items)

    def put(self, leg: _Leg, event: LegEvent) -> None:
        """Take the next event. One alone may have any size: nobody is slow yet."""
        size, waited, backlog = weigh(event), self.held, self._backlog
        if not self._items:
            backlog.enter(self)  # type: ignore[arg-type]  # of whatever legs
        self._items.append((size, leg, event))
        self.held += size
        backlog.held += size
        if waited > backlog.stream_bytes:
            self.overflow()
        elif waited and backlog.held > backlog.total_bytes:
            backlog.largest().overflow()

    def pop(self) -> tuple[_Leg, LegEvent] | None:
        """The next event, or None when all were read."""
        if not self._items:
            return None
        size, leg, event = self._items.popleft()
        self.held -= size
        self._backlog.held -= size
        if not self._items:
            self._backlog.leave(self)  # type: ignore[arg-type]
        return leg, event

    def clear(self) -> None:
        """Forget what waits."""
        self._backlog.held -= self.held
        self.held = 0
        self._items.clear()
        self._backlog.leave(self)  # type: ignore[arg-type]
