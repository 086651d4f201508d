"""Limit of the requests and tokens of a batch that are in an engine at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple


class _Waiting(NamedTuple):
    weight: int
    places: int
    turn: asyncio.Future[None]


class Window:
    """Limit of concurrent requests and of their total tokens, granted in FIFO order.

    A request above a limit runs alone. Belongs to one event loop.
    """

    def __init__(self, most: int, tokens: int) -> None:
        """Allow ``most`` requests with ``tokens`` tokens in total, both at least 1."""
        self._places = most
        self._most = self._tokens = tokens
        self._waiting: deque[_Waiting] = deque()

    async def take(self, weight: int, places: int = 1) -> None:
        """Wait for ``places`` places with ``weight`` tokens in total, after all earlier waiters."""
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
        """Return places, all at once or one by one."""
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
