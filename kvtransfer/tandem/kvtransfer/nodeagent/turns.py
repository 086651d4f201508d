"""Whose request is next: one of each consumer in turn, so that none waits for all of another's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Who = TypeVar("Who")
What = TypeVar("What")


class InTurn(Generic[Who, What]):
    """Requests that have not begun, in the order of their turns."""

    def __init__(self, may: Callable[[Who], bool]) -> None:
        """``may`` says whose request may begin now; the turn of others passes to the next."""
        self._may = may
        self._waiting: dict[Who, deque[What]] = {}
        """The first is next; who has had a turn goes to the end."""
        self.waiting = 0
        """How many have not begun."""

    def __bool__(self) -> bool:
        """Whether one may begin."""
        return any(self._may(who) for who in self._waiting)

    def add(self, who: Who, what: What) -> None:
        """Behind all that ``who`` has asked."""
        self._waiting.setdefault(who, deque()).append(what)
        self.waiting += 1

    def take(self) -> tuple[Who, What]:
        """The next one that may begin, of which there is one."""
        who = next(each for each in self._waiting if self._may(each))
        queue = self._waiting.pop(who)
        what = queue.popleft()
        self.waiting -= 1
        if queue:
            self._waiting[who] = queue
        return who, what

    def drop(self, who: Who) -> None:
        """All of one's, who is gone."""
        self.waiting -= len(self._waiting.pop(who, ()))
