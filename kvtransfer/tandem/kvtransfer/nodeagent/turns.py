"""Round-robin queue of requests: one of each consumer in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Who = TypeVar("Who")
What = TypeVar("What")


class InTurn(Generic[Who, What]):
    """Requests that have not begun, in the order of their turns."""

    def __init__(self, may: Callable[[Who], bool]) -> None:
        """``may`` returns whether a consumer's request may begin now; the others are skipped."""
        self._may = may
        self._waiting: dict[Who, deque[What]] = {}
        """Queues by consumer; the first is next, and a served one moves to the end."""
        self.waiting = 0
        """Number of requests that have not begun."""

    def __bool__(self) -> bool:
        """Return whether one may begin."""
        return any(self._may(who) for who in self._waiting)

    def add(self, who: Who, what: What) -> None:
        """Queue a request after the others of ``who``."""
        self._waiting.setdefault(who, deque()).append(what)
        self.waiting += 1

    def take(self) -> tuple[Who, What]:
        """Return the next one that may begin; there must be one."""
        who = next(each for each in self._waiting if self._may(each))
        queue = self._waiting.pop(who)
        what = queue.popleft()
        self.waiting -= 1
        if queue:
            self._waiting[who] = queue
        return who, what

    def drop(self, who: Who) -> None:
        """Drop all requests of a consumer that is gone."""
        self.waiting -= len(self._waiting.pop(who, ()))
