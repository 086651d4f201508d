"""The dispatcher when workers refuse, fail, lie or are late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing

import msgspec
import pytest
from tests.router.behaviours import (
    ANSWER,
    Make,
    fail_with,
    has_read,
    keep_quiet,
    ledgers,
    refuse_with,
    wait_to,
)
from tests.router.builders import BUSY, Stack, beats, make_request, tokens_of
from tests.router.fake_worker import Turn, serve_well
from tests.waiting import until

from tandem.protocol.errors import (
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.protocol.outputs import EngineCoreOutput, FinishReason
from tandem.protocol.requests import Consume
from tandem.router.dispatch.retry_policy import AttemptFailure


async def test_refusals_move_on(stack: Stack, prefill: Make, decode: Make) -> None:
    """A full worker is passed over, and its health does not suffer."""
    d1, d2 = decode(behaviour=refuse_with(RefusalCode.CAPACITY)), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert len(d1.submitted) == 1
    assert not stack.fleet.health.suspect(d1.incarnation, 0.0)
    assert (
        stack.metric("tandem:router_attempt_failures_total", kind="refused", reason="capacity") == 1
    )


async def test_unlinked_pair_falls_back(stack: Stack, prefill: Make, decode: Make) -> None:
    """PEER_UNKNOWN from D rules out the pair, not the workers."""

    def knows_nobody(turn: Turn) -> Iterator[float]:
        if turn.request.kv is not None:
            turn.refuse(Refusal(code=RefusalCode.PEER_UNKNOWN, message="who?"))
        else:
            yield from serve_well(turn)

    p, d = prefill(), decode(behaviour=knows_nobody)
    await stack.find(p, d)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert d.submitted[1].kv is None


async def test_non_retryable_refusals(stack: Stack, decode: Make) -> None:
    """What every worker would refuse is told at once, with the field."""
    invalid = refuse_with(RefusalCode.INVALID)
    d1, d2 = decode(behaviour=invalid), decode(behaviour=invalid)
    await stack.find(d1, d2)

    with pytest.raises(RequestRefused) as caught:
        await stack.run(make_request())
    assert caught.value.refusal.param == "top_k"
    assert len(d1.submitted) + len(d2.submitted) == 1


@pytest.mark.parametrize(
    "code", [RefusalCode.UNSUPPORTED, RefusalCode.NEVER_FITS, RefusalCode.CAPACITY]
)
async def test_refused_by_all(stack: Stack, decode: Make, code: RefusalCode) -> None:
    """When nobody takes it the refusal is the answer."""
    d1, d2 = decode(behaviour=refuse_with(code)), decode(behaviour=refuse_with(code))
    await stack.find(d1, d2)

    with pytest.raises(RequestRefused) as caught:
        await stack.run(make_request())
    assert code is caught.value.refusal.code
    assert 1 == len(d1.submitted) == len(d2.submitted)


async def test_expired_at_the_worker(stack: Stack, decode: Make) -> None:
    """A worker that finds the budget spent ends the request."""
    await stack.find(decode(behaviour=refuse_with(RefusalCode.EXPIRED)))

    with pytest.raises(RequestFailed) as caught:
        await stack.run(make_request())
    assert FailCause.TIMEOUT is caught.value.cause


async def test_at_most_three_attempts(stack: Stack, decode: Make) -> None:
    """Then the request fails with every reason, first to last."""
    workers = [decode(behaviour=fail_with(FailCause.INTERNAL)) for _ in range(4)]
    await stack.find(*workers)

    with pytest.raises(RequestFailed) as caught:
        await stack.run(make_request())
    assert sum(len(worker.submitted) for worker in workers) == 3
    assert len(caught.value.reasons) == 3
    assert "internal" in caught.value.reasons[0]


def bad_bytes(turn: Turn) -> Iterator[float]:
    """A decode worker that can use nothing of what is handed over."""
    if isinstance(turn.request.kv, Consume):
        turn.accept()
        turn.fail(FailCause.DIGEST)
    else:
        yield from serve_well(turn)


async def test_bad_bytes_quarantine_the_link(stack: Stack, prefill: Make, decode: Make) -> None:
    """One digest failure closes a link until one end is another process; an end whose own link was
    lost for a moment is none."""
    p, d = prefill(step=0.05), decode(behaviour=bad_bytes)
    await stack.find(p, d)
    pair = (p.incarnation, d.incarnation)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert pair in stack.fleet.quarantined()
    await until(lambda: p.submitted)
    await stack.run(make_request())
    assert len(p.submitted) == 1
    d.skip_sequence()
    await until(lambda: d.num_greeted == 2)
    await stack.known(p, d)
    await until(lambda: p.incarnation in stack.pool.workers[d.incarnation].peers)
    assert pair in stack.fleet.quarantined()
    await stack.run(make_request())
    assert len(p.submitted) == 1


async def test_of_those_that_are_gone_no_link_is_called_quarantined(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """Also where the failure is read when its worker is lost already; nothing else of it stays."""
    p, d = prefill(), decode()
    await stack.find(p, d)
    pair = (p.incarnation, d.incarnation)
    d.stop()
    await until(lambda: d.incarnation not in stack.pool.workers)
    for cause in (*[FailCause.TIMEOUT] * 3, *[FailCause.INTERNAL] * 3, FailCause.DIGEST):
        failure = AttemptFailure(
            worker=d.incarnation, worker_name="d", pair=pair, message="", cause=cause
        )
        stack.fleet.blame(failure, 0.0)

    assert stack.fleet.quarantined() == {}
    assert not stack.fleet.links.rests(pair, 1.0)
    assert not stack.fleet.health.suspect(d.incarnation, 1.0)
    assert stack.fleet.handoffs == {}


async def test_contradiction_fails_closed(stack: Stack, prefill: Make, decode: Make) -> None:
    """P and D disagree on token 1: nothing more is emitted, nothing is tried again."""

    def wrong(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield from wait_to(turn, has_read(stack))
        turn.token(0, token=777)

    p, d = prefill(), decode(behaviour=wrong)
    await stack.find(p, d)
    seen: list[EngineCoreOutput] = []

    async def read() -> None:
        async with aclosing(stack.stream(make_request())) as outputs:
            async for output in outputs:
                seen.append(output)  # noqa: PERF401  what came before the error counts

    with pytest.raises(RequestFailed, match="failed closed") as caught:
        await read()
    assert FailCause.IDENTITY is caught.value.cause
    assert tokens_of(seen) == [100]
    assert len(d.submitted) == 1
    assert (p.incarnation, d.incarnation) in stack.fleet.links.quarantined()


async def test_gap_is_the_workers_fault(stack: Stack, decode: Make) -> None:
    """A missing position ends the attempt; another worker goes on."""

    def skips(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.token(0)
        yield 0.0
        turn.token(2)

    d1, d2 = decode(behaviour=skips), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert d2.submitted[0].emitted == ((100,),)


async def test_ended_by_abort_is_a_failure(stack: Stack, decode: Make) -> None:
    """A worker that ends a request that nobody aborted has failed it."""

    def aborts(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.say(outputs=(EngineCoreOutput(*turn.key, 0, 0, (), FinishReason.ABORT),))
        yield from ()

    await stack.find(decode(behaviour=aborts))

    with pytest.raises(RequestFailed, match="abort"):
        await stack.run(make_request())


async def test_repeated_frames_and_foreign_attempts(stack: Stack, decode: Make) -> None:
    """Repeats change nothing; frames of unknown keys are dropped and counted."""

    def twice(turn: Turn) -> Iterator[float]:
        turn.accept()
        for position in range(8):
            turn.token(position)
            if position < 7:
                turn.token(position)
            turn.say(outputs=(EngineCoreOutput(turn.key[0], 7, 0, position, (5,)),))
            yield 0.001

    await stack.find(decode(behaviour=twice))

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert stack.metric("tandem:router_tokens_repeated_total") == 7
    await until(lambda: stack.metric("tandem:router_frames_dropped_total", reason="stale") == 8)


async def test_closing_cancels_both_legs(stack: Stack, prefill: Make, decode: Make) -> None:
    """aclose sends CANCEL to P and D and frees what was counted for them."""
    p, d = prefill(), decode(step=0.02)
    await stack.find(p, d)

    async with aclosing(stack.stream(make_request())) as outputs:
        async for _ in outputs:
            break

    await until(lambda: d.cancelled and p.cancelled)
    assert 0 == len(stack.dispatcher.jobs) == stack.admission.num_running
    assert all(
        w.num_legs == w.leg_tokens == w.leg_compute_tokens == 0 for w in stack.pool.workers.values()
    )


async def test_deadline(stack: Stack, decode: Make) -> None:
    """A request ends at its deadline whatever its worker does."""
    d = decode(step=0.2)
    await stack.find(d)
    started = time.monotonic()

    with pytest.raises(RequestFailed, match="deadline") as caught:
        await stack.run(make_request(budget_ms=500))
    assert FailCause.TIMEOUT is caught.value.cause
    assert 0.45 < time.monotonic() - started < 10
    await until(lambda: d.cancelled)


async def test_not_accepted_in_time(decode: Make) -> None:
    """A worker that beats but does not accept is passed over."""
    stack = Stack(accept_timeout=20.0)
    d1, d2 = decode(behaviour=keep_quiet), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: d1.submitted)
    let_pass(stack, 21.0)
    assert tokens_of(await running) == ANSWER
    assert len(d1.submitted) == 1
    await stack.close()


def let_pass(stack: Stack, seconds: float) -> None:
    """The attempt that runs has begun, and was heard, so much earlier."""
    (job,) = stack.dispatcher.jobs
    assert job.attempt is not None
    job.attempt.overslept(-seconds)


async def test_no_token_in_time(decode: Make) -> None:
    """Neither is one that stops in the middle."""

    def stops(turn: Turn) -> Iterator[float]:
        turn.accept()
        turn.token(0)
        yield 60.0

    stack = Stack(progress_timeout=20.0)
    d1, d2 = decode(behaviour=stops), decode()
    await stack.find(d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    running = asyncio.create_task(stack.run(make_request()))
    await until(lambda: any(each.num_tokens for each in ledgers(stack)))
    let_pass(stack, 21.0)
    assert tokens_of(await running) == ANSWER
    assert d2.submitted[0].emitted == ((100,),)
    await stack.close()


async def test_waiting_in_a_workers_queue_is_no_fault(decode: Make) -> None:
    """A worker that says that some wait is only busy: the request's turn comes, and from then
    on its time for a first token runs."""

    def takes_its_time(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield 2.1
        turn.worker.load = BUSY
        yield 0.6  # and one sweep
        yield from serve_well(turn)

    stack = Stack(progress_timeout=2.0)
    d1, d2 = decode(behaviour=takes_its_time), decode()
    await stack.find(d1, d2)
    d1.load = msgspec.structs.replace(BUSY, num_waiting=3, num_running=0)
    d2.load = msgspec.structs.replace(BUSY, num_waiting=9)
    await beats(stack, d1)
    await beats(stack, d2)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert d2.submitted == []
    await stack.close()


async def test_deadline_in_the_queue(stack: Stack, decode: Make) -> None:
    """Waiting for a turn counts against the deadline."""
    d = decode()
    await stack.find(d)
    await stack.admission.enter(100_000)

    with pytest.raises(RequestFailed, match="deadline"):
        await stack.run(make_request(budget_ms=50))
    assert d.submitted == []
    stack.admission.leave(100_000)
    assert stack.admission.num_running == stack.admission.num_waiting == 0
