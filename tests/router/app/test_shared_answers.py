"""Answers that are dear to make: fresh for each that asks, made once for all that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import until, wait_for

from tandem.router.http.shared_answers import BURST, SharedAnswers
from tandem.router.metrics import RouterMetrics, only

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


class Maker:
    def __init__(self) -> None:
        self.made = 0
        self.threads: set[int] = set()

    def prepare(self) -> Callable[[], bytes]:
        assert threading.current_thread() is threading.main_thread()
        self.made += 1
        made = self.made

        def make() -> bytes:
            self.threads.add(threading.get_ident())
            return b"%d" % made

        return make


@pytest.fixture
def answers() -> SharedAnswers:
    return SharedAnswers()


async def test_one_that_asks_alone_gets_what_was_made_for_it(answers: SharedAnswers) -> None:
    """Never an answer that was begun before it asked."""
    maker = Maker()
    for number in range(1, BURST):
        assert await answers.get("a", maker.prepare) == b"%d" % number
    assert threading.main_thread().ident not in maker.threads
    answers.close()


async def test_many_that_ask_share_what_is_made(answers: SharedAnswers) -> None:
    """Hundreds at once are one answer; in a long row they are paced."""
    maker = Maker()
    found = await asyncio.gather(*(answers.get("a", maker.prepare) for _ in range(300)))
    assert set(found) == {b"1"}
    rounds = 0

    async def poll() -> None:
        nonlocal rounds
        while True:
            await answers.get("a", maker.prepare)
            rounds += 1

    pollers = [asyncio.create_task(poll()) for _ in range(50)]
    await until(lambda: rounds >= 50 * (BURST + 1))
    for each in pollers:
        each.cancel()
    assert maker.made <= BURST + 5, "an answer for each round of all of them"
    answers.close()


async def test_owners_do_not_wait_for_each_other(answers: SharedAnswers) -> None:
    """One that has used its burst up waits; another one is answered at once."""
    maker = Maker()
    asked = [
        asyncio.create_task(answers.get(str(n), maker.prepare, owner="hog")) for n in range(60)
    ]
    await asyncio.sleep(0)
    await answers.get("a", maker.prepare, owner="other")
    assert not all(each.done() for each in asked)
    for each in asked:
        each.cancel()
    answers.close()


async def test_an_error_is_raised_for_all_that_wait(answers: SharedAnswers) -> None:

    def fails() -> Callable[[], bytes]:
        raise ValueError("not this time")

    found = await asyncio.gather(
        *(answers.get("a", fails) for _ in range(3)), return_exceptions=True
    )
    assert [str(each) for each in found] == ["not this time"] * 3
    assert await answers.get("a", Maker().prepare) == b"1"
    answers.close()


def test_gauges_are_read_when_the_exposition_is_asked_for() -> None:
    """Not by the thread that writes it, while what they read changes."""
    metrics, readers = RouterMetrics("m"), []
    value = 1.0

    def read() -> dict[tuple[str, ...], float]:
        readers.append(threading.get_ident())
        return only(value)

    metrics.gauge("tandem:test", "A gauge.", (), read)
    write = metrics.reading()
    value = 2.0
    with ThreadPoolExecutor(1) as threads:
        text = threads.submit(write).result()
    assert b"tandem:test 1.0" in text
    assert set(readers) == {threading.get_ident()}
    assert b"tandem:test 2.0" in metrics.text()


PATHS = [
    *("/metrics", "/openapi.json", "/debug/canary", "/debug/fleet", "/debug/fabric"),
    *("/debug/requests", "/debug/requests?limit=100", "/debug/placements", "/tokenizer_info"),
]


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
def test_what_is_dear_is_made_once_for_all_that_ask(serve: Serve, decode: Make, path: str) -> None:
    """Twenty that ask while it is being made get the next one together."""
    served = serve(decode(), enable_tokenizer_info_endpoint=True)
    answers: SharedAnswers = served.app.state.answers
    made, taken, answer, gate = 0, 0, answers._answer, threading.Event()

    async def counted(waiting: list[asyncio.Future[bytes]], *args: Any) -> None:
        nonlocal made, taken
        made, taken = made + 1, taken + len(waiting)
        await answer(waiting, *args)

    answers._answer = counted  # type: ignore[method-assign, assignment]
    answers._threads.submit(gate.wait)
    with ThreadPoolExecutor(20) as threads:
        asked = [threads.submit(clear_text.get, served.url + path) for _ in range(20)]
        # The first answer may be for more than one: a busy loop accepts several at a time.
        wait_for(lambda: taken + sum(map(len, list(answers._waiting.values()))) >= 20 or made > 3)
        gate.set()
        assert {each.result().status_code for each in asked} == {200}
    assert made <= 2  # one if the first answer took all of them
