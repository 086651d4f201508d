"""Whose fault it is when an attempt ends: a link's, a worker's, or nobody's at a deadline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from tests.router.behaviours import ANSWER, Make, fail_with, keep_quiet
from tests.router.builders import BUSY, Stack, beats, make_request, tokens_of
from tests.router.fake_worker import FakeWorker, Turn, serve_well
from tests.waiting import until

from tandem.protocol.errors import DeadlinePassed, FailCause
from tandem.router.placement.rates import FAULTS, TIMEOUTS

FAILURES = "tandem:router_attempt_failures_total"


@pytest_asyncio.fixture
async def impatient() -> AsyncIterator[Stack]:
    """A dispatcher that waits 1 s for a token."""
    made = Stack(progress_timeout=1.0)
    yield made
    await made.close()


def times_out(turn: Turn) -> Iterator[float]:
    """A decode worker that says a token, and then that it had no time for more."""
    yield from speaks(turn)
    turn.fail(FailCause.TIMEOUT)


def finds_a_wrong_token(turn: Turn) -> Iterator[float]:
    """One whose own token is not what it should be."""
    yield from speaks(turn)
    turn.fail(FailCause.IDENTITY)


def falls_silent(turn: Turn) -> Iterator[float]:
    """One that says no more, and beats."""
    yield from speaks(turn)
    yield 60.0


def speaks(turn: Turn) -> Iterator[float]:
    turn.accept()
    yield 0.02
    turn.token(0)
    turn.token(1)


@pytest.mark.full
@pytest.mark.parametrize("behaviour", [times_out, finds_a_wrong_token, falls_silent])
async def test_a_decode_worker_that_has_spoken_fails_by_itself(
    impatient: Stack, prefill: Make, decode: Make, behaviour
) -> None:
    """The hand-off is over: its link is not to blame, and the next attempt may have the same
    prefill worker, not that decode worker."""
    stack, p, d1, d2 = impatient, prefill(), decode(behaviour=behaviour), decode()
    await stack.find(p, d1, d2)
    d2.load = BUSY
    await beats(stack, d2)

    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert [len(each.submitted) for each in (p, d1, d2)] == [2, 1, 1]
    pair = (p.incarnation, d1.incarnation)
    assert stack.fleet.handoffs[pair].failed == 0
    assert stack.fleet.quarantined() == {}
    suspects = set()
    for _ in range(FAULTS - 1):
        await stack.run(make_request())
        suspects = {view.name for view in stack.fleet.snapshot(stack.now).workers if view.suspect}
    assert not stack.fleet.links.rests(pair, stack.now)
    assert bool(suspects) == (behaviour is not finds_a_wrong_token)


async def test_a_decode_worker_that_has_not_spoken_fails_by_its_link(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """It waited for KV in vain; far from any deadline of the client's."""
    p, d = prefill(behaviour=keep_quiet), decode(behaviour=times_out_waiting)
    await stack.find(p, d)
    pair = (p.incarnation, d.incarnation)

    for _ in range(TIMEOUTS):
        assert tokens_of(await stack.run(make_request())) == ANSWER
    assert stack.fleet.handoffs[pair].failed == TIMEOUTS
    assert stack.fleet.links.rests(pair, stack.now)


def times_out_waiting(turn: Turn) -> Iterator[float]:
    """A decode worker to which no KV comes."""
    if turn.request.kv is None:
        yield from serve_well(turn)
        return
    turn.accept()
    turn.fail(FailCause.TIMEOUT)


@pytest.mark.parametrize("pair", [True, False], ids=["handed over", "whole"])
async def test_a_clients_deadline_is_nobodys_fault(
    stack: Stack, prefill: Make, decode: Make, pair: bool
) -> None:
    """A worker's clock may be first to say that a request's time is over: it is that, for the
    client and for the books."""
    workers: list[FakeWorker] = [decode(behaviour=fail_with(FailCause.TIMEOUT))]
    if pair:
        workers.append(prefill(behaviour=fail_with(FailCause.TIMEOUT)))
    await stack.find(*workers)

    for _ in range(max(FAULTS, TIMEOUTS)):
        with pytest.raises(DeadlinePassed):
            await stack.run(make_request(budget_ms=90))
    assert stack.metric(FAILURES, kind="failed", reason="timeout") == 0
    assert not any(view.suspect for view in stack.fleet.snapshot(stack.now).workers)
    assert len(stack.fleet.usable_links(stack.now)) == int(pair)
    assert [count.failed for count in stack.fleet.handoffs.values() if count.failed] == []


async def test_what_came_by_the_deadline_is_read(stack: Stack, decode: Make) -> None:
    """All tokens, however slow their reader is; behind them stands that the time is over."""
    await stack.find(decode(behaviour=times_out))
    outputs = stack.stream(make_request(budget_ms=1_500))

    assert (await anext(outputs)).token_ids == (ANSWER[0],)
    (job,) = stack.dispatcher.jobs
    await until(lambda: job.expired)
    assert (await anext(outputs)).token_ids == (ANSWER[1],)
    with pytest.raises(DeadlinePassed):
        await anext(outputs)
    assert stack.metric(FAILURES, kind="failed", reason="timeout") == 0
