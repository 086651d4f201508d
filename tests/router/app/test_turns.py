"""Requests that come at once begin in rounds of the event loop of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.router.dispatch.admission import Turns
from tandem.router.http.middleware import InTurn


class Rounds:
    """Counts rounds of the event loop, and in which of them requests begin."""

    def __init__(self) -> None:
        self.now = 0
        self.begun: list[tuple[str, int]] = []
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._count)

    def _count(self) -> None:
        self.now += 1
        self._loop.call_soon(self._count)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """An application that notes when it is called."""
        self.begun.append((scope["path"], self.now))


def ask(turns: InTurn, path: str, method: str = "POST", kind: str = "http") -> asyncio.Task[None]:
    scope = {"type": kind, "method": method, "path": path}
    receive: Any = None
    return asyncio.create_task(turns(scope, receive, receive))


@pytest.fixture
async def rounds() -> Rounds:
    return Rounds()


async def test_each_has_a_round_of_its_own(rounds: Rounds) -> None:
    """In the order in which they came; sockets are looked at between."""
    turns = InTurn(rounds.app, Turns())
    await asyncio.gather(*(ask(turns, str(number)) for number in range(6)))
    assert [path for path, _ in rounds.begun] == [str(number) for number in range(6)]
    assert len({at for _, at in rounds.begun}) == 6


async def test_one_that_is_alone_waits_for_nobody(rounds: Rounds) -> None:
    """Nor does the first of several."""
    turns = InTurn(rounds.app, Turns())
    for path in ("a", "b"):
        before = rounds.now
        await ask(turns, path)
        assert rounds.begun[-1][1] <= before + 1
        await asyncio.sleep(0)


async def test_what_is_quick_waits_for_no_turn(rounds: Rounds) -> None:
    """Health, metrics, and what begins and ends the application."""
    turns = InTurn(rounds.app, Turns())
    tasks = [ask(turns, "slow"), ask(turns, "slow")]
    tasks += [ask(turns, "/health", "GET"), ask(turns, "/", kind="lifespan")]
    await asyncio.gather(*tasks)
    assert [path for path, _ in rounds.begun] == ["slow", "/health", "/", "slow"]


async def test_who_has_gone_takes_no_turn(rounds: Rounds) -> None:
    turns = InTurn(rounds.app, Turns())
    tasks = [ask(turns, str(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [path for path, _ in rounds.begun] == ["0", "3"]
    await ask(turns, "later")
    assert rounds.begun[-1][0] == "later"
