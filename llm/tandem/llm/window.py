"""How much of a batch is in an engine at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple


class _Waiting(NamedTuple):
    weight: int
    places: int
    turn: asyncio.Future[None]


class Window:
    """Places for at most so many requests, and so many tokens in all, taken in the order of asking.

    Whoever weighs more than all places, or wants more of them, goes alone. Belongs to one event
    loop.
    """

    def __init__(self, most: int, tokens: int) -> None:
        """``most`` requests of together ``tokens`` tokens, both at least 1."""
        self._places = most
        self._most = self._tokens = tokens
        self._waiting: deque[_Waiting] = deque()

    async def take(self, weight: int, places: int = 1) -> None:
        """Wait for so many places, for ``weight`` tokens together, behind everybody who waits."""
        if not self._waiting and self._has_room(weight, places):
            self._seat(weight, places)
            return
        waiting = _Waiting(weight, places, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.cancelled():
                self._call_next()
            else:  # it was called, and left before it came
                self.give(weight, places)
            raise

    def give(self, weight: int, places: int = 1) -> None:
        """Give places back, all at once or one by one."""
        self._places += places
        self._tokens += weight
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting:
            weight, places, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._has_room(weight, places):
                    return
                self._seat(weight, places)
                turn.set_result(None)
            self._waiting.popleft()

    def _has_room(self, weight: int, places: int) -> bool:
        if self._tokens == self._most:  # nobody is inside
            return True
        return self._places >= places and weight <= self._tokens

    def _seat(self, weight: int, places: int) -> None:
        self._places -= places
        self._tokens -= weight
