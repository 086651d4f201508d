"""When jobs are placed: none holds the loop for long, and many at once have a round each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.router.behaviours import ANSWER, Make, wait_to
from tests.router.builders import Stack, make_request, tokens_of
from tests.router.fake_worker import Turn, serve_well
from tests.waiting import until

from tandem.llm.cpu_pool import CpuPool
from tandem.protocol.errors import DeadlinePassed, Refusal, RefusalCode, RequestRefused
from tandem.protocol.hashing import hash_blocks
from tandem.protocol.outputs import EngineCoreOutput
from tandem.router.dispatch import job as prompt_hashes
from tandem.router.dispatch import placing
from tandem.router.dispatch.admission import Turns
from tandem.router.placement.policy import PlacementPolicy

MANY = 20


@pytest.fixture
async def placed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The loop's round of each placement from now on."""
    loop, rounds, at = asyncio.get_running_loop(), 0, list[int]()
    place = PlacementPolicy.place

    def count() -> None:
        nonlocal rounds
        rounds += 1
        loop.call_soon(count)

    def noted(*given: object) -> object:
        at.append(rounds)
        return place(*given)  # type: ignore[arg-type]  # as they came

    count()
    monkeypatch.setattr(PlacementPolicy, "place", noted)
    return at


def speak_once(turn: Turn) -> Iterator[float]:
    turn.accept()
    turn.token(0)
    yield 60.0


def ask(stack: Stack, count: int = MANY) -> list[asyncio.Task[list[EngineCoreOutput]]]:
    return [asyncio.create_task(stack.run(make_request())) for _ in range(count)]


async def all_answer(asked: list[asyncio.Task[list[EngineCoreOutput]]]) -> None:
    for outputs in await asyncio.gather(*asked):
        assert tokens_of(outputs) == ANSWER


async def test_streams_of_a_lost_worker_go_on_in_rounds_of_their_own(
    stack: Stack, decode: Make, placed: list[int]
) -> None:
    """They hear of it at once, and healthy streams wait for one of them at most."""
    d1, d2 = decode(behaviour=speak_once), decode()
    await stack.find(d1)
    asked = ask(stack, 50)
    await until(lambda: len(d1.submitted) == 50)
    await until(lambda: all(job.ledger.num_tokens for job in stack.dispatcher.jobs))
    await stack.find(d2)
    del placed[:]
    stack.pool.workers[d1.incarnation].connection._down("the test says so")
    await all_answer(asked)
    assert len(d2.submitted) == len(placed) == len(set(placed)) == 50


async def test_who_waited_for_a_worker_begins_in_a_round_of_its_own(
    decode: Make, placed: list[int]
) -> None:
    """All of them hear at once that it is up."""
    stack = Stack(worker_wait=10.0)
    asked = ask(stack)
    await until(lambda: len(placed) == MANY)
    d = decode(max_model_len=1 << 20)
    del placed[:]
    stack.pool.add(d.endpoint)
    await all_answer(asked)
    begun = placed[-MANY:]
    assert len(d.submitted) == len(set(begun)) == MANY
    await stack.close()


async def test_who_is_let_in_with_others_begins_in_a_round_of_its_own(
    stack: Stack, decode: Make, placed: list[int]
) -> None:
    """Behind a long prompt that leaves the queue's house."""
    all_wait = threading.Event()

    def held(turn: Turn) -> Iterator[float]:
        steps = serve_well(turn)
        yield next(steps)
        yield from wait_to(turn, lambda _: all_wait.is_set())
        yield from steps

    stack.admission.limits = replace(stack.admission.limits, max_inflight_tokens=1000)
    d = decode(behaviour=held)
    await stack.find(d)
    long = asyncio.create_task(stack.run(make_request(1000)))
    await until(lambda: stack.admission.num_running == 1)
    asked = ask(stack)
    await until(lambda: stack.admission.num_waiting == MANY)
    del placed[:]
    all_wait.set()
    await all_answer([long, *asked])
    assert len(placed) == len(set(placed)) == MANY


async def test_who_is_over_in_its_turn_is_sent_to_nobody(stack: Stack, decode: Make) -> None:
    """What ends a request is looked for again behind each wait."""
    d1, d2 = decode(behaviour=speak_once), decode()
    await stack.find(d1)
    asked = ask(stack)
    await until(lambda: len(d1.submitted) == MANY)
    await until(lambda: all(job.ledger.num_tokens for job in stack.dispatcher.jobs))
    await stack.find(d2)
    jobs = list(stack.dispatcher.jobs)
    stack.pool.workers[d1.incarnation].connection._down("the test says so")
    await asyncio.sleep(0)  # they know, and one has its turn
    assert sum(job.attempt is None for job in jobs) == MANY - 1
    for job in jobs[:-1]:
        job.expire()
    asked[-1].cancel()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(each, DeadlinePassed) for each in results) == MANY - 1
    await until(lambda: d2.submitted)
    assert len(d2.submitted) == 1


async def test_a_long_prompt_is_hashed_beside_the_loop(
    stack: Stack, decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each size of blocks that is up; short ones at once, and each once."""
    threads: list[tuple[int, int]] = []

    def noted(*given: object) -> object:
        threads.append((len(given[1]), threading.get_ident()))  # type: ignore[arg-type]
        return hash_blocks(*given)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(prompt_hashes, "hash_blocks", noted)
    d1 = decode(max_model_len=1 << 20)
    d2 = decode(max_model_len=1 << 20, block_size=64)
    await stack.find(d1, d2)
    assert tokens_of(await stack.run(make_request(20_000))) == ANSWER
    assert [size for size, _ in threads] == [20_000] * 2
    assert threading.get_ident() not in {thread for _, thread in threads}
    assert len((d1.submitted + d2.submitted)[0].block_hashes) in (1250, 312)

    del threads[:]
    assert tokens_of(await stack.run(make_request(200))) == ANSWER
    assert threads == [(200, threading.get_ident())] * 2


async def test_an_answer_that_has_begun_does_not_end_for_want_of_a_thread(
    stack: Stack, decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is lost, and the next has blocks of another size; who has heard nothing yet is
    refused."""

    async def busy(*_: object) -> None:
        raise RequestRefused(Refusal(code=RefusalCode.CAPACITY, message="all threads are taken"))

    d1 = decode(behaviour=speak_once, max_model_len=1 << 20)
    await stack.find(d1)
    asked = asyncio.create_task(stack.run(make_request(20_000)))
    await until(lambda: any(job.ledger.num_tokens for job in stack.dispatcher.jobs))
    await stack.find(decode(max_model_len=1 << 20, block_size=64))
    monkeypatch.setattr(CpuPool, "run", busy)
    stack.pool.workers[d1.incarnation].connection._down("the test says so")
    assert tokens_of(await asked) == ANSWER
    with pytest.raises(RequestRefused, match="all threads"):
        await stack.run(make_request(21_000))


async def test_whose_deadline_passes_before_its_turn_hears_so_then(
    stack: Stack, decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    d1 = decode(behaviour=speak_once)
    await stack.find(d1)
    asked = asyncio.create_task(stack.run(make_request()))
    await until(lambda: any(job.ledger.num_tokens for job in stack.dispatcher.jobs))
    (job,) = stack.dispatcher.jobs
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(Turns, "take", lambda _: never)
    job.deadline = asyncio.get_running_loop().time() + 0.1
    stack.pool.workers[d1.incarnation].connection._down("the test says so")
    with pytest.raises(DeadlinePassed):
        await asyncio.wait_for(asked, 20)


async def test_the_ceiling_counts_a_long_prompt_in_many_rounds(
    stack: Stack, decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    add: Callable[[tuple[bytes, ...]], None] = stack.dispatcher.hit_ceiling.add

    def noted(hashes: tuple[bytes, ...]) -> None:
        counted.append(len(hashes))
        add(hashes)

    monkeypatch.setattr(stack.dispatcher.hit_ceiling, "add", noted)
    await stack.find(decode(max_model_len=1 << 20))
    for _ in range(2):
        assert tokens_of(await stack.run(make_request(20_000))) == ANSWER
    await until(lambda: sum(counted) == 2 * 1250)
    assert max(counted) == placing.COUNTED
    assert stack.dispatcher.hit_ceiling.read() == pytest.approx(0.5, abs=0.02)
