"""Places for part of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from tandem.llm import pooled
from tandem.llm.cpu_pool import weight
from tandem.llm.pooled import Patience, Window
from tandem.llm.sampling import MOST_TOGETHER, parts_of, prompt_tokens
from tandem.text.prompts import TextPrompt, TokensPrompt


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_are_taken_in_the_order_of_asking() -> None:
    """A small one behind a large one that waits does not pass it; both bounds hold."""
    window, inside = Window(3, 10), []

    async def come(name: str, tokens: int) -> None:
        await window.take(tokens)
        inside.append(name)

    asked = [("a", 4), ("b", 5), ("c", 6), ("d", 1), ("e", 1), ("f", 1)]
    tasks = [asyncio.create_task(come(*each)) for each in asked]
    await settle()
    assert inside == ["a", "b"]
    window.give(4)
    await settle()
    assert inside == ["a", "b"]
    window.give(5)
    await settle()
    assert inside == ["a", "b", "c", "d", "e"]
    window.give(6)
    await settle()
    assert inside[5:] == ["f"]
    await asyncio.gather(*tasks)


async def test_what_is_too_large_goes_alone() -> None:
    """It waits for all places to be free, and others for it."""
    window, inside = Window(5, 10), []

    async def come(tokens: int) -> None:
        await window.take(tokens)
        inside.append(tokens)

    tasks = [asyncio.create_task(come(tokens)) for tokens in (3, 50, 2)]
    await settle()
    assert inside == [3]
    window.give(3)
    await settle()
    assert inside == [3, 50]
    window.give(50)
    await settle()
    assert inside == [3, 50, 2]
    await asyncio.gather(*tasks)


async def test_who_leaves_takes_no_place() -> None:
    """Neither one that waits, nor one that was called and left before it came."""
    window = Window(1, 10)
    await window.take(8)
    leaving = asyncio.create_task(window.take(9))
    behind = asyncio.create_task(window.take(2))
    await settle()
    leaving.cancel()
    window.give(8)
    await asyncio.wait_for(behind, 60)
    called = asyncio.create_task(window.take(10))
    await settle()
    window.give(2)
    called.cancel()
    with pytest.raises(asyncio.CancelledError):
        await called
    await asyncio.wait_for(window.take(10), 60)


async def test_one_that_leaves_lets_those_behind_it_in() -> None:
    window = Window(5, 10)
    await window.take(4)
    large = asyncio.create_task(window.take(9))
    small = asyncio.create_task(window.take(2))
    await settle()
    assert not small.done()
    large.cancel()
    await asyncio.wait_for(small, 60)


async def test_several_places_are_taken_at_once() -> None:
    """All of them or none, given back one by one; who wants more than there are goes alone."""
    window = Window(4, 100)
    await window.take(10, 3)
    behind = asyncio.create_task(window.take(10, 2))
    alone = asyncio.create_task(window.take(10, 9))
    await settle()
    assert not behind.done()
    window.give(5)
    await settle()
    assert behind.done()
    window.give(5, 2)
    window.give(5)
    await settle()
    assert not alone.done()
    window.give(5)
    await asyncio.wait_for(alone, 60)
    window.give(10, 9)
    await asyncio.wait_for(window.take(100, 4), 60)


def test_a_batch_is_prepared_in_parts() -> None:
    """In order, by tokens and by number; one that is larger than a part goes alone."""
    ids = [TokensPrompt((1,) * size) for size in (3, 4, 5, 90, 1, 1, 1, 1)]
    parts = list(parts_of(ids, 8, 3))
    assert [[len(each.token_ids) for each in part] for part in parts] == [  # type: ignore[union-attr]
        [3, 4],
        [5],
        [90],
        [1, 1, 1],
        [1],
    ]
    assert list(parts_of([], 8, 3)) == []
    small = list(parts_of([[1]] * (2 * MOST_TOGETHER + 1), 10**6, 10**6))
    assert list(map(len, small)) == [MOST_TOGETHER, MOST_TOGETHER, 1]


async def test_the_wait_that_takes_too_long_ends_all() -> None:
    """By one timer: waits that end in time are nobody's concern, however many there are."""

    async def hang() -> None:
        async with Patience(0.05) as patience:
            patience.begin()
            patience.begin()
            patience.end()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await hang()


class Clock:
    """A loop's time that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Mock:
        """See loop; nobody cancels in the middle."""
        self._timers.append((when, call))
        return Mock()

    async def tick(self, seconds: float) -> None:
        """Timers ring when it is time, and who is hurt by one has its turn."""
        self.now += seconds
        due = [each for each in self._timers if each[0] <= self.now]
        self._timers = [each for each in self._timers if each[0] > self.now]
        for _, call in due:
            call()
        await settle()


async def test_waits_one_after_the_other_may_take_longer_together() -> None:
    """Each has its own time, also one that begins when the timer is set for another; where nobody
    waits, no time is over."""
    async with Patience(1.0) as patience:
        patience._loop = clock = Clock()  # type: ignore[assignment]
        for _ in range(6):
            patience.begin()
            patience.begin()
            await clock.tick(0.4)
            patience.end()
            await clock.tick(0.4)
            patience.end()
        await clock.tick(3.0)


def test_tokens_of_prompts() -> None:
    """Ids as they are, texts by their characters."""
    assert prompt_tokens(TokensPrompt((1, 2, 3), None)) == 3
    assert prompt_tokens(TextPrompt("four" * 5)) == 5
    assert prompt_tokens(TextPrompt("")) == 1


def test_ids_weigh_what_they_weighed() -> None:
    """A list of whole numbers is weighed without looking at each."""
    assert weight([1] * 700) == 1400
    assert weight([1, "ab"]) == 2 + 1 + 3
    assert weight([True, 2]) == 4
    assert weight([[1, 2], [3]]) == 2 + 4 + 2
    assert pooled.STEPS_AHEAD > 2
