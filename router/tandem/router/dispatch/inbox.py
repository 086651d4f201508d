"""Unread events of workers: bounded in bytes, for one request and for all.

A client that does not read stops the request's own task, not its workers. Their further events wait
here, up to a limit. Beyond it the answer is given up, so that one slow client does not cost the
router's memory. Sizes are estimates.

Many frames may come before the reading task has its turn. Events since its last read therefore do
not count as unread; a client is judged by those that are still here a while later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tandem.protocol.outputs import EngineCoreOutput, PooledOutput
from tandem.router.workers.connection import LegEvent

_EVENT_BYTES = 400
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 120
_MOST = 2
"""Multiple of the limit of all inboxes beyond which an answer being read may be given up."""
_LOOKS = 64
"""Most searches of all inboxes while their bytes grow by the limit. A search without a result is so
not repeated for each event of the same turn of the loop."""

_Leg = TypeVar("_Leg")


def weigh(event: LegEvent) -> int:
    """Return about how many bytes of memory an event takes."""
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
    """Counts of all inboxes of a router."""

    def __init__(self, *, stream_bytes: int = 4 << 20, total_bytes: int = 256 << 20) -> None:
        self.stream_bytes = stream_bytes
        self.total_bytes = total_bytes
        self.held = 0
        """Bytes in all inboxes."""
        self._look_beyond = total_bytes
        """Bytes in all inboxes beyond which an answer to give up is searched for."""
        self._inboxes: set[Inbox[object]] = set()

    def enter(self, inbox: Inbox[object]) -> None:
        """Add an inbox with events."""
        self._inboxes.add(inbox)

    def leave(self, inbox: Inbox[object]) -> None:
        """Remove an inbox that is empty."""
        self._inboxes.discard(inbox)

    def make_room(self) -> None:
        """Give up the largest answer of the tenant with the most bytes, if all inboxes hold too
        much. Answers being read are spared, unless the events of one turn of the loop exceed the
        limit by far."""
        if self.held <= self.total_bytes:
            self._look_beyond = self.total_bytes
        if self.held <= self._look_beyond:
            return
        left = [each for each in self._inboxes if not each.awaited]
        if sum(each.behind for each in left) > self.total_bytes:
            found = left
        elif sum(each.behind for each in self._inboxes) > _MOST * self.total_bytes:
            found = list(self._inboxes)
        else:
            self._look_beyond = self.held + self.total_bytes // _LOOKS
            return
        self._look_beyond = self.total_bytes
        behind: Counter[str] = Counter()
        for each in found:
            behind[each.tenant] += each.behind
        most = max(behind, key=behind.__getitem__)
        of_tenant = [each for each in found if each.tenant == most]
        max(of_tenant, key=lambda inbox: inbox.behind).overflow()


class Inbox(Generic[_Leg]):
    """Events of one attempt; read in the order of arrival."""

    def __init__(self, backlog: Backlog, overflow: Callable[[], None], tenant: str = "") -> None:
        """``overflow`` is called if too much waits; it should ``clear``."""
        self.tenant = tenant
        self.held = 0
        """Bytes of the waiting events."""
        self.awaited = False
        """True if the reader has read all and waits, or is about to continue reading."""
        self.overflow = overflow
        self._backlog = backlog
        self._items: deque[tuple[int, _Leg, LegEvent]] = deque()
        self._largest = 0
        """Bytes of the largest waiting event, or 0 if that is not known."""
        self._had_too_much = False
        """True if too much waited at the last ``judge``, and not all of it was read since."""

    def __bool__(self) -> bool:
        """Return whether events wait."""
        return bool(self._items)

    @property
    def behind(self) -> int:
        """Return the waiting bytes without the largest event. A single event may have any size."""
        return self.held - self._largest

    def put(self, leg: _Leg, event: LegEvent) -> None:
        """Add the next event."""
        size, backlog = weigh(event), self._backlog
        if not self._items:
            backlog.enter(self)  # type: ignore[arg-type]  # of whatever legs
        self._items.append((size, leg, event))
        self._largest = max(self._largest, size)
        self.held += size
        backlog.held += size
        backlog.make_room()

    def judge(self, *, stood_still: bool) -> None:
        """Call ``overflow`` if more than the limit of one answer was here at the last call, too,
        unless the loop ``stood_still`` since, and the reader with it. Called periodically."""
        too_much = not self.awaited and self.behind > self._backlog.stream_bytes
        if too_much and self._had_too_much and not stood_still:
            self.overflow()
        else:
            self._had_too_much = too_much

    def pop(self) -> tuple[_Leg, LegEvent] | None:
        """Return the next event, or None if all were read."""
        if not self._items:
            return None
        size, leg, event = self._items.popleft()
        self.held -= size
        self._backlog.held -= size
        if size == self._largest:
            self._largest = 0
        if not self._items:
            self._emptied()
        return leg, event

    def clear(self) -> None:
        """Drop all waiting events."""
        self._backlog.held -= self.held
        self.held = self._largest = 0
        self._items.clear()
        self._emptied()

    def _emptied(self) -> None:
        self._had_too_much = False
        self._backlog.leave(self)  # type: ignore[arg-type]
