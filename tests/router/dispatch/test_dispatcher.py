"""The dispatcher over real sockets: placing, merging, failing over, cancelling."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import aclosing

import msgspec
import pytest
from tests.router.behaviours import ANSWER, Make, behind, die, die_after, has_read, ledgers
from tests.router.builders import BUSY, Stack, beats, make_request, tokens_of
from tests.router.fake_worker import Turn, serve_well
from tests.waiting import until

from tandem.protocol.commands import Command, CommandName
from tandem.protocol.context import RequestContext, Route, Shape
from tandem.protocol.errors import DeadlinePassed, RequestFailed
from tandem.protocol.outputs import BlockEvents, FinishReason
from tandem.protocol.requests import Consume, Produce
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.job import Job


async def test_hand_off(stack: Stack, prefill: Make, decode: Make) -> None:
    """P and D get the request at once under one key; the client gets each position once."""
    p, d = prefill(), decode(behaviour=behind(has_read(stack)))  # P is first
    await stack.find(p, d)

    outputs = await stack.run(make_request())

    assert tokens_of(outputs) == ANSWER
    assert FinishReason.LENGTH is outputs[-1].finish
    assert p.submitted[0].key == d.submitted[0].key
    assert Produce(d.incarnation) == p.submitted[0].kv
    assert Consume(p.incarnation) == d.submitted[0].kv
    assert p.submitted[0].params.seed is not None
    assert p.submitted[0].params.seed == d.submitted[0].params.seed
    assert 0 < (p.submitted[0].budget_ms or 0) <= 10_000
    assert len(p.submitted[0].block_hashes) == 2
    assert [] == p.cancelled == d.cancelled
    assert stack.metric("tandem:router_tokens_repeated_total") == 1
    assert stack.metric("tandem:router_first_token_total", source="prefill") == 1


async def test_each_request_brings_its_own_wishes(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """As values: two callers in one task, without HTTP, go each its way, and users a third."""
    p, d = prefill(), decode()
    await stack.find(p, d)
    pair, alone = Route(shape=Shape.DISAGGREGATED), Route(shape=Shape.AGGREGATED)
    now = asyncio.get_running_loop().time()

    for route in (pair, alone):
        outputs = await stack.run(make_request(), RequestContext(route=route, arrived=now - 5))
        assert tokens_of(outputs) == ANSWER
    assert (pair.served_shape, alone.served_shape) == (pair.shape, alone.shape)
    assert [request.kv is None for request in d.submitted] == [False, True]
    first_token = "vllm:time_to_first_token_seconds"
    assert stack.metric(f"{first_token}_count", model_name="fake") == 0

    await stack.run(make_request(), RequestContext(arrived=now - 5))
    assert stack.metric(f"{first_token}_count", model_name="fake") == 1
    assert stack.metric(f"{first_token}_sum", model_name="fake") > 5


async def test_what_a_router_was_asked_for_is_seen_at_once_and_soon_forgotten(
    stack: Stack, decode: Make
) -> None:
    """Each prompt once, by what no cache had of it, however many attempts it takes."""
    failing, spare = decode(behaviour=die_after(stack, 1)), decode(load=BUSY)
    await stack.find(failing, spare)
    await beats(stack, spare)
    await stack.run(make_request(40))
    assert [len(each.submitted) for each in (failing, spare)] == [1, 1]
    now = asyncio.get_running_loop().time()
    seen = stack.fleet.snapshot(now).arrivals
    assert 0 < seen.prompts_per_s <= 1
    assert seen.tokens_per_s == pytest.approx(40 * seen.prompts_per_s)
    assert stack.fleet.snapshot(now + 10).arrivals.prompts_per_s < 0.001


async def test_a_deadline_counts_from_when_a_call_came(stack: Stack, decode: Make) -> None:
    """The server's and the client's own; of a prompt whose turn comes too late no worker hears."""
    d = decode()
    await stack.find(d)
    now = asyncio.get_running_loop().time()
    with pytest.raises(DeadlinePassed):
        await stack.run(make_request(), RequestContext(arrived=now - 10.5))
    own = msgspec.structs.replace(make_request(), budget_ms=3_000)
    with pytest.raises(DeadlinePassed):
        await stack.run(own, RequestContext(arrived=now - 3.5))

    assert d.submitted == []
    assert not stack.dispatcher.jobs
    assert tokens_of(await stack.run(own)) == ANSWER


async def test_without_prefill_worker(stack: Stack, decode: Make) -> None:
    """A decode worker alone does both halves."""
    d = decode()
    await stack.find(d)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert d.submitted[0].kv is None


async def test_workers_of_other_block_sizes_are_a_pair_and_get_their_own_hashes(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """Each is hashed in its own blocks, and credited with the tokens of its own hits."""
    p, d = prefill(block_size=16), decode(block_size=64)
    await stack.find(p, d)
    await stack.run(make_request(200))
    await until(lambda: p.submitted)
    (mine,), (other,) = d.submitted, p.submitted
    assert (len(other.block_hashes), len(mine.block_hashes)) == (12, 3)
    assert set(other.block_hashes).isdisjoint(mine.block_hashes)
    assert mine.kv == Consume(p.incarnation)

    d.tell_blocks(BlockEvents(stored=mine.block_hashes[:2]))
    p.tell_blocks(BlockEvents(stored=other.block_hashes[:5]))
    await until(lambda: len(stack.fleet.index) == 7)
    hashes = {
        worker.fingerprint: sent.block_hashes
        for worker in stack.pool.workers.values()
        for sent in (mine if worker.incarnation == d.incarnation else other,)
    }
    hits = stack.fleet.hits(hashes)
    assert hits == {d.incarnation: 128, p.incarnation: 80}


async def test_a_request_goes_on_where_blocks_have_another_size(stack: Stack, decode: Make) -> None:
    """The KV is of the same kind: tokens that were emitted stand."""
    d1, d2 = decode(behaviour=die_after(stack, 2)), decode(block_size=64)
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)
    assert tokens_of(await stack.run(make_request(200))) == ANSWER
    assert len(d2.submitted[0].block_hashes) == 3


async def test_one_token_goes_whole_to_the_prefill_worker(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    p, d = prefill(), decode()
    await stack.find(p, d)

    outputs = await stack.run(make_request(max_tokens=1))

    assert tokens_of(outputs) == [100]
    assert FinishReason.LENGTH is outputs[-1].finish
    assert p.submitted[0].kv is None
    assert d.submitted == []


async def test_prompt_logprobs_stay_on_one_worker(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """They come from one worker, with the first token."""
    p, d = prefill(), decode()
    await stack.find(p, d)

    outputs = await stack.run(make_request(prompt_logprobs=1))

    assert len(outputs[0].prompt_logprobs or ()) == 40
    assert p.submitted == []


async def test_choices(stack: Stack, prefill: Make, decode: Make) -> None:
    """n choices are one hand-off, each in order."""
    await stack.find(prefill(), decode())

    outputs = await stack.run(make_request(n=3))

    for choice in range(3):
        assert [token + choice for token in ANSWER] == tokens_of(outputs, choice)


async def test_token_one_ends_it(stack: Stack, prefill: Make, decode: Make) -> None:
    """End-of-sequence from P closes the log; D is told to let go."""
    p, d = prefill(answer=[0]), decode(step=60.0)
    await stack.find(p, d)

    outputs = await stack.run(make_request())

    assert tokens_of(outputs) == [0]
    assert FinishReason.STOP is outputs[-1].finish
    await until(lambda: d.cancelled and p.cancelled)


async def test_decode_worker_may_be_first(stack: Stack, prefill: Make, decode: Make) -> None:
    """Token 1 comes from whoever says it first; the second saying is dropped."""

    def has_read_both(_: Turn) -> bool:
        return any(each.num_repeated for each in ledgers(stack))

    p = prefill(behaviour=behind(has_read(stack)))
    d = decode(behaviour=behind(lambda _: True, has_read_both), step=0.001)
    await stack.find(p, d)

    outputs = await stack.run(make_request(max_tokens=40))

    assert list(range(100, 140)) == tokens_of(outputs)
    assert stack.metric("tandem:router_first_token_total", source="decode") == 1
    assert stack.metric("tandem:router_tokens_repeated_total") == 1


async def test_decode_worker_dies(stack: Stack, prefill: Make, decode: Make) -> None:
    """Another one goes on with the emitted tokens forced and the same seed."""
    p, d1, d2 = prefill(), decode(behaviour=die_after(stack, 4)), decode()
    await stack.find(p, d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    outputs = await stack.run(make_request())

    assert tokens_of(outputs) == ANSWER
    assert d2.submitted[0].emitted == ((100, 101, 102, 103),)
    assert d2.submitted[0].key.attempt == 1
    assert d1.submitted[0].params.seed == d2.submitted[0].params.seed
    assert isinstance(d2.submitted[0].kv, Consume)
    await until(lambda: len(p.submitted) == 2)
    assert p.submitted[1].emitted == ((100, 101, 102, 103),)


async def test_prefill_worker_dies_first(stack: Stack, prefill: Make, decode: Make) -> None:
    """The next kind of attempt: another P for the same D; no token is lost or changed."""
    p1, p2 = prefill(behaviour=die_after(stack, 0)), prefill()
    d = decode(behaviour=consume_slowly)
    await stack.find(p1, p2, d)
    p2.load = BUSY
    await beats(stack, p2)

    outputs = await stack.run(make_request())

    assert tokens_of(outputs) == ANSWER
    await until(lambda: len(p2.submitted) == 1)
    assert [attempt for _, attempt in d.cancelled] == [0]
    assert (
        stack.metric("tandem:router_attempts_total", shape="handoff", kind="another_prefill") == 1
    )


def consume_slowly(turn: Turn) -> Iterator[float]:
    """A decode worker that waits long for its KV in the first attempt."""
    if turn.request.key.attempt == 0:
        turn.accept()
        yield 30.0
    yield from serve_well(turn)


async def test_prefill_workers_all_die(stack: Stack, prefill: Make, decode: Make) -> None:
    """The last kind but one: D prefills by itself."""
    p, d = prefill(behaviour=die_after(stack, 1)), decode(behaviour=consume_slowly)
    await stack.find(p, d)

    outputs = await stack.run(make_request())

    assert tokens_of(outputs) == ANSWER
    assert d.submitted[1].kv is None
    assert d.submitted[1].emitted == ((100,),)


async def test_prefill_worker_dies_after_the_hand_off(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """Once D has spoken, P no longer matters."""
    p, d = prefill(), decode(step=0.03)
    await stack.find(p, d)

    async with aclosing(stack.stream(make_request())) as outputs:
        ids: list[int] = []
        async for output in outputs:
            ids += output.token_ids
            if len(ids) == 3:
                p.stop()

    assert ids == ANSWER
    assert len(d.submitted) == 1


async def test_resumed_choices_go_whole(stack: Stack, prefill: Make, decode: Make) -> None:
    """n>1 resumes on one worker; choices that ended are not continued."""

    def die_between(turn: Turn) -> Iterator[float]:
        turn.accept()
        for position in range(8):
            turn.token(position, choice=0)
        turn.token(0, choice=1)
        yield from die(turn, has_read(stack, 9))

    p, d1, d2 = prefill(), decode(behaviour=die_between), decode()
    await stack.find(p, d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    outputs = await stack.run(make_request(n=2))

    assert tokens_of(outputs, 0) == ANSWER
    assert [token + 1 for token in ANSWER] == tokens_of(outputs, 1)
    assert d2.submitted[0].kv is None
    assert d2.submitted[0].finished_choices == (0,)


async def test_stays_within_one_fingerprint(stack: Stack, decode: Make) -> None:
    """After a token was emitted no worker of another revision goes on."""
    d1, d2 = decode(behaviour=die_after(stack, 2)), decode(revision="r2")
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    with pytest.raises(RequestFailed):
        await stack.run(make_request())
    assert d2.submitted == []


async def test_commands_reach_every_worker(stack: Stack, prefill: Make, decode: Make) -> None:
    await stack.find(prefill(), decode())

    reply = await stack.dispatcher.call(Command(id=9, name=CommandName.STATS))

    assert reply.ok
    assert reply.id == 9
    assert reply.values == {"num_running": 2.0, "engines": 2.0, "asleep": 0.0}


async def test_describe(decode: Make) -> None:
    """The card is known as soon as a decode worker is up."""
    stack = Stack(worker_wait=10.0)
    waiting = asyncio.create_task(stack.dispatcher.describe())
    await asyncio.sleep(0.01)
    d = decode()
    await stack.find(d)

    assert d.card == await waiting
    await stack.close()


@pytest.mark.parametrize("failing", [False, True])
async def test_a_request_that_is_over_is_gone(
    stack: Stack, prefill: Make, decode: Make, *, failing: bool
) -> None:
    """Without the collector of cycles: its prompts would wait for it by the thousand, and every
    stream for its end."""
    workers = [prefill(behaviour=die_after(stack, 0)) if failing else prefill(), decode()]
    await stack.find(*workers)
    gc.collect()
    gc.disable()
    try:
        assert tokens_of(await stack.run(make_request())) == ANSWER
        await asyncio.sleep(0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [each for each in gc.garbage if isinstance(each, Attempt | Job)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
