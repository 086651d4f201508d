"""What workers said and no client has read yet: bounded in bytes, of one request and of all.

A client that does not read stops the request's own task, not its workers. What they go on to say
waits here, up to a limit; where more stays here the answer is given up, so that one client's
stillness never costs the router's memory. Estimates of sizes are good enough for that.

Frames come many at a time, before the task that reads has its turn: what came since it last asked
is no sign of stillness, and its client is judged by what is still here a while later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tandem.protocol.outputs import EngineCoreOutput, PooledOutput
from tandem.router.workers.seams import LegEvent

_EVENT_BYTES = 400
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 120
_MOST = 2
"""Times the bytes of all inboxes beyond which room is made by one whose reader is not to blame."""
_LOOKS = 64
"""Looks at all inboxes, at most, while what they hold grows by as much as they may hold: one that
found nobody to blame is not repeated for each event of the same turn of the loop."""

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
        self._look_beyond = total_bytes
        """Bytes in all of them beyond which somebody is looked for who has to go."""
        self._inboxes: set[Inbox[object]] = set()

    def enter(self, inbox: Inbox[object]) -> None:
        """An inbox holds something."""
        self._inboxes.add(inbox)

    def leave(self, inbox: Inbox[object]) -> None:
        """An inbox is empty."""
        self._inboxes.discard(inbox)

    def make_room(self) -> None:
        """Have the largest answer of the tenant that holds most given up if too much waits in all:
        of those whose readers leave it here, unless what came for others in one turn of the loop is
        more than that by far."""
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
    """Of one attempt; read in the order of arrival."""

    def __init__(self, backlog: Backlog, overflow: Callable[[], None], tenant: str = "") -> None:
        """``overflow`` is called when too much waits; it should ``clear``."""
        self.tenant = tenant
        self.held = 0
        """Bytes that wait."""
        self.awaited = False
        """The reader has read all and waits, or is about to read on: it leaves nothing here."""
        self.overflow = overflow
        self._backlog = backlog
        self._items: deque[tuple[int, _Leg, LegEvent]] = deque()
        self._largest = 0
        """Bytes of the largest event that waits, or 0 where that is not known."""
        self._had_too_much = False
        """At the last ``judge``; less than all of it was read since."""

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._items)

    @property
    def behind(self) -> int:
        """Bytes that wait beside the largest event. One alone may have any size."""
        return self.held - self._largest

    def put(self, leg: _Leg, event: LegEvent) -> None:
        """Take the next event."""
        size, backlog = weigh(event), self._backlog
        if not self._items:
            backlog.enter(self)  # type: ignore[arg-type]  # of whatever legs
        self._items.append((size, leg, event))
        self._largest = max(self._largest, size)
        self.held += size
        backlog.held += size
        backlog.make_room()

    def judge(self, *, stood_still: bool) -> None:
        """Call it now and then: ``overflow`` where more than one answer may leave here was here at
        the last call, too, unless the loop ``stood_still`` since, and the reader with it."""
        too_much = not self.awaited and self.behind > self._backlog.stream_bytes
        if too_much and self._had_too_much and not stood_still:
            self.overflow()
        else:
            self._had_too_much = too_much

    def pop(self) -> tuple[_Leg, LegEvent] | None:
        """The next event, or None when all were read."""
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
        """Forget what waits."""
        self._backlog.held -= self.held
        self.held = self._largest = 0
        self._items.clear()
        self._emptied()

    def _emptied(self) -> None:
        self._had_too_much = False
        self._backlog.leave(self)  # type: ignore[arg-type]
