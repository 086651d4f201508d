"""What placement expected of an attempt, and what came of it, for each that was made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tests.router.behaviours import behind, has_read, wait_to
from tests.router.builders import Stack, beats, make_request
from tests.router.fake_worker import Turn

from tandem.protocol.card import WorkerRole
from tandem.protocol.messages import LoadReport
from tandem.router.placement.forecast import Targets
from tandem.router.placement.policy import PlacementPolicy
from tandem.router.tenant import NO_KEYS

LOAD = LoadReport(
    num_running=0,
    num_waiting=0,
    waiting_tokens=0,
    free_blocks=1000,
    total_blocks=1000,
    prompt_steps=((64, 1.0),),
    decode_steps=((1, 0.01),),
    chunk_tokens=64,
    residence_s=2.0,
)
"""A slow worker: what D would take from its streams is worth the hand-off."""


async def test_an_attempt_is_explained(make_worker) -> None:
    """All ways with their numbers, times as they came; the error of the forecast is counted."""
    stack = Stack()
    producer = make_worker(WorkerRole.PREFILL)

    def speaks_second(turn: Turn) -> Iterator[float]:
        """Some time after who computed, and times are as they came."""
        turn.accept()
        yield from wait_to(turn, has_read(stack))
        yield 0.1
        yield from behind()(turn)

    consumer = make_worker(WorkerRole.DECODE, behaviour=speaks_second)
    producer.load = consumer.load = LOAD
    stack.dispatcher._placing.policy = PlacementPolicy(Targets(0.3, 0.025), 5.0)
    await stack.find(producer, consumer)
    await beats(stack, producer)
    await beats(stack, consumer)
    await stack.run(make_request(40))

    (told,) = stack.dispatcher.explanations.to_json(NO_KEYS)
    assert told["prompt_tokens"] == 40
    assert told["rule"].startswith("pair ")
    assert [way["way"] for way in told["ways"] if way["chosen"]] == ["pair"]
    assert {way["way"] for way in told["ways"]} == {"pair", "decode", "prefill"}
    assert all(way["answers_s"] >= 0.01 for way in told["ways"])
    assert 0 <= told["ttft_s"] < 5
    assert told["second_s"] >= 0
    assert stack.metric("tandem:router_forecast_error_seconds_count", way="pair") == 1
    await stack.close()


async def test_a_router_that_stood_still_before_a_first_token_adds_nothing_to_the_second(
    make_worker,
) -> None:
    """It learns of its standing still behind the token that it reads first when it goes on."""
    stack = Stack()
    producer = make_worker(WorkerRole.PREFILL)

    def second(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield from wait_to(turn, has_read(stack))
        (job,) = stack.dispatcher.jobs
        assert job.attempt is not None
        loop.call_soon_threadsafe(job.attempt.overslept, 5.0)
        yield 0.1
        yield from behind()(turn)

    loop = asyncio.get_running_loop()
    consumer = make_worker(WorkerRole.DECODE, behaviour=second)
    await stack.find(producer, consumer)
    await stack.run(make_request(40))

    (told,) = stack.dispatcher.explanations.to_json(NO_KEYS)
    assert told["second_s"] >= 0
    await stack.close()
