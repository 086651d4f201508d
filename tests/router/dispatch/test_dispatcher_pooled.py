"""Requests without tokens through the dispatcher: one worker answers them whole, and once."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.router.builders import STRICT, Stack, beats, inc, make_request, view
from tests.router.fake_worker import FakeWorker, Turn
from tests.waiting import until

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import FailCause, Refusal, RefusalCode, RequestFailed, RequestRefused
from tandem.protocol.messages import LoadReport
from tandem.protocol.outputs import PooledOutput
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams
from tandem.protocol.requests import EngineCoreRequest
from tandem.router.dispatch.attempt import weigh
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, PromptFacts

Make = Callable[..., FakeWorker]


def pooled(num_prompt: int = 40, budget_ms: int | None = None) -> EngineCoreRequest:
    request = make_request(num_prompt)
    return msgspec.structs.replace(
        request, params=NO_SAMPLING, pooling=PoolingParams(), budget_ms=budget_ms
    )


def vector_of(outputs: list[PooledOutput], worker: FakeWorker, request: EngineCoreRequest) -> bool:
    (output,) = outputs
    assert output.num_prompt_tokens == len(request.prompt_token_ids)
    return output.values == array("f", worker.values_of(request)).tobytes()


async def test_a_prefill_worker_alone_answers(stack: Stack, prefill: Make, decode: Make) -> None:
    """Nothing is handed over, no decode worker hears of it, nothing is held at the end."""
    p, d = prefill(num_cached=16), decode()
    await stack.find(p, d)

    assert vector_of(await stack.vectors(pooled()), p, pooled())
    (sent,) = p.submitted
    assert sent.kv is None
    assert d.submitted == []
    assert p.cancelled == []
    assert len(stack.dispatcher.jobs) == 0
    assert stack.pool.workers[p.incarnation].num_legs == 0
    assert stack.metric("vllm:e2e_request_latency_seconds_count", model_name="fake") == 1
    assert stack.metric("vllm:time_to_first_token_seconds_count", model_name="fake") == 0
    assert stack.metric("vllm:prompt_tokens_total", model_name="fake") == 40
    assert stack.metric("vllm:prompt_tokens_cached_total", model_name="fake") == 16
    assert stack.metric("tandem:router_attempts_total", shape="whole", kind="first") == 1


@pytest.mark.parametrize("caches", [True, False])
async def test_a_prompt_is_hashed_for_workers_that_cache_blocks(
    stack: Stack, prefill: Make, caches: bool
) -> None:
    """For others nobody takes the time: an encoder keeps no KV."""
    worker = prefill()
    worker.card = msgspec.structs.replace(worker.card, prefix_caching=caches)
    await stack.find(worker)
    await stack.vectors(pooled())
    assert len(worker.submitted[0].block_hashes) == (2 if caches else 0)
    assert (stack.dispatcher.hit_ceiling.read() is not None) == caches


async def test_a_hand_off_has_hashes_whoever_caches(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """By them the two know that they mean the same blocks, and what a cache would have found is
    counted."""
    p, d = prefill(), decode()
    for worker in (p, d):
        worker.card = msgspec.structs.replace(worker.card, prefix_caching=False)
    await stack.find(p, d)
    await stack.run(make_request(40))
    assert len(p.submitted[0].block_hashes) == 2
    assert p.submitted[0].block_hashes == d.submitted[0].block_hashes
    assert stack.dispatcher.hit_ceiling.read() is not None


@pytest.mark.parametrize("role", list(WorkerRole))
async def test_any_worker_alone_is_enough(
    stack: Stack, make_worker: Make, role: WorkerRole
) -> None:
    """A decode worker without any prefill worker, and the other way round: its card is known."""
    worker = make_worker(role)
    await stack.find(worker)

    assert await stack.dispatcher.describe() == worker.card
    assert vector_of(await stack.vectors(pooled()), worker, pooled())


async def test_the_least_loaded_prefill_worker_answers(stack: Stack, prefill: Make) -> None:
    busy = LoadReport(
        num_running=9, num_waiting=9, waiting_tokens=9_000, free_blocks=1000, total_blocks=1000
    )
    p1, p2 = prefill(load=busy), prefill()
    await stack.find(p1, p2)
    await beats(stack, p1)

    await stack.vectors(pooled())
    assert (len(p1.submitted), len(p2.submitted)) == (0, 1)


def dies(turn: Turn) -> Iterator[float]:
    """Accepts, then fails as an engine that breaks down."""
    turn.accept()
    yield 0.01
    turn.fail(FailCause.INTERNAL)


def says_tokens(turn: Turn) -> Iterator[float]:
    turn.accept()
    turn.token(0)
    yield 0.01


def says_nothing(turn: Turn) -> Iterator[float]:
    """Answers with a vector of no values."""
    turn.accept()
    turn.say(outputs=(PooledOutput(*turn.key, b"", 40, 0),))
    yield 0.01


@pytest.mark.parametrize("behaviour", [dies, says_tokens, says_nothing])
async def test_a_failure_goes_up_the_ladder(
    stack: Stack, prefill: Make, decode: Make, behaviour: Callable[[Turn], Iterator[float]]
) -> None:
    """A worker that fails, or says what is no vector: another answers, at last a decode worker."""
    p, d = prefill(behaviour=behaviour), decode()
    await stack.find(p, d)

    assert vector_of(await stack.vectors(pooled()), d, pooled())
    assert len(p.submitted) == 1
    assert stack.metric("tandem:router_attempt_failures_total", kind="failed", reason="internal")


async def test_the_last_attempt_may_be_a_prefill_worker_s(stack: Stack, prefill: Make) -> None:
    broken = [prefill(behaviour=dies), prefill(behaviour=dies)]
    await stack.find(*broken)
    asking = asyncio.create_task(stack.vectors(pooled()))
    await until(lambda: sum(len(each.submitted) for each in broken) == 2)
    for each in broken:
        assert len(each.submitted) == 1
    with pytest.raises(RequestFailed):
        await asking

    good = prefill()
    await stack.find(good)
    for each in broken:
        each.stop()
    assert vector_of(await stack.vectors(pooled()), good, pooled())


async def test_a_worker_that_is_lost_is_replaced(stack: Stack, prefill: Make) -> None:
    """Its link breaks between acceptance and answer."""

    def stops(turn: Turn) -> Iterator[float]:
        turn.accept()
        while True:
            yield 0.05

    p1 = prefill(behaviour=stops)
    await stack.find(p1)
    asking = asyncio.create_task(stack.vectors(pooled()))
    await until(lambda: bool(p1.submitted))
    p2 = prefill()
    await stack.find(p2)
    p1.stop()

    assert vector_of(await asking, p2, pooled())


async def test_a_refusal_that_all_would_repeat_ends_it(stack: Stack, prefill: Make) -> None:

    def refuses(turn: Turn) -> Iterator[float]:
        turn.refuse(Refusal(code=RefusalCode.INVALID, message="dimensions: 9", param="dimensions"))
        yield 0.01

    p1, p2 = prefill(behaviour=refuses), prefill(behaviour=refuses)
    await stack.find(p1, p2)
    with pytest.raises(RequestRefused, match="dimensions: 9"):
        await stack.vectors(pooled())
    assert len(p1.submitted) + len(p2.submitted) == 1


async def test_deadline_and_cancel_reach_the_worker(stack: Stack, prefill: Make) -> None:
    """A budget that passes, and a client that leaves: CANCEL, and nothing is held."""

    def waits(turn: Turn) -> Iterator[float]:
        turn.accept()
        while True:
            yield 0.05

    p = prefill(behaviour=waits)
    await stack.find(p)
    with pytest.raises(RequestFailed, match="deadline"):
        await stack.vectors(pooled(budget_ms=200))
    await until(lambda: len(p.cancelled) == 1)

    asking = asyncio.create_task(stack.vectors(pooled()))
    await until(lambda: len(p.submitted) == 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: len(p.cancelled) == 2)
    assert len(stack.dispatcher.jobs) == 0


async def test_a_vector_for_a_request_of_tokens_is_a_failure(stack: Stack, decode: Make) -> None:
    """The worker is at fault, another goes on."""

    def says_vector(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.say(outputs=(PooledOutput(*turn.key, bytes(16), 40, 0),))
        yield 0.01

    d1 = decode(behaviour=says_vector)
    await stack.find(d1)
    with pytest.raises(RequestFailed):
        await stack.run(make_request())
    assert stack.metric("tandem:router_attempt_failures_total", kind="failed", reason="internal")


def test_workers_that_do_not_pool_are_passed_by() -> None:
    """Those of a build before; where there are no others, there is no place."""
    old = view(1, WorkerRole.PREFILL, pools=False)
    new = view(2, WorkerRole.DECODE)
    facts = PromptFacts(num_tokens=40, max_new_tokens=1, one_token=True, pooled=True)
    placed = STRICT.place(facts, FleetSnapshot((old, new)), Exclusions())
    assert placed is not None
    assert (placed.worker, placed.prefill) == (inc(2), None)
    assert STRICT.place(facts, FleetSnapshot((old,)), Exclusions()) is None


def test_a_vector_that_waits_to_be_read_counts_with_its_bytes() -> None:
    """The router's bound on what waits holds for vectors."""
    assert weigh(PooledOutput("a", 0, bytes(10_000), 1, 0)) >= 10_000
