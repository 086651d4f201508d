"""What a producing scheduler promises: fences, chunks, quotas, no preemption."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from tests.engine_plan.builders import params_of, request_of
from tests.engine_plan.handoff import ConsumerSide
from tests.engine_plan.pair import Pair, consume, produce

from tandem.engine.executor.base import OnKVWritten
from tandem.engine.step import FenceDone, ModelRunnerOutput, SchedulerOutput
from tandem.protocol.errors import RefusalCode
from tandem.protocol.kv import Fence


class SlowFence:
    """A fence that is done when the test says so."""

    def __init__(self) -> None:
        self.landed = False

    def done(self) -> bool:
        return self.landed


def test_fences_travel_with_what_they_fence():
    """P's chunks carry the fence of their own step; D's loads wait for the last step's fence."""
    pair = Pair(max_num_batched_tokens=16)
    fences: list[Fence] = []

    def make_fence(_plan: object) -> Fence:
        fences.append(SlowFence())
        return fences[-1]

    for harness in (pair.p, pair.d):
        harness.executor._make_fence = make_fence
    request = pair.prefill()
    assert pair.producer.exports[request.key].fences == fences

    other = request_of("b", 5, params=params_of(max_tokens=4, ignore_eos=True))
    pair.d.add(other)
    pair.d.step()
    leg = pair.reserve()
    assert leg.key not in pair.consumer.loads
    for fence in fences:
        assert isinstance(fence, SlowFence)
        fence.landed = True
    pair.d.step()
    assert leg.key in pair.consumer.loads


def test_chunks_are_announced_as_they_are_computed():
    """A cached prefix comes with the first chunk; then each step's tokens, without gaps."""
    pair = Pair(max_num_batched_tokens=16)
    prompt = list(range(50)) + list(range(10))
    pair.p.add(request_of("warm", prompt[:33]))
    pair.p.run()
    request = produce("a", prompt)
    pair.p.add(request)

    upto = []
    for _ in range(2):
        pair.p.step()
        upto.append(pair.producer.exports[request.key].upto)

    assert upto == [48, 60]


class KnowsWritten(Future[ModelRunnerOutput]):
    """A step's future whose KV is written before its result is there."""

    def __init__(self, step: Future[ModelRunnerOutput], fence: Fence, read: Callable[[], None]):
        super().__init__()
        self._step, self._fence, self._read = step, fence, read

    def wait_nearly(self, seconds: float) -> Fence:
        return self._fence

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._read()
        return self._step.result(timeout)


def know_written(pair: Pair, read: Callable[[], None]) -> list[Fence]:
    """Have P's steps tell of their KV first, by these fences; ``read`` is called before results."""
    fences: list[Fence] = []
    execute = pair.p.executor.execute

    def ahead(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        fences.append(FenceDone())
        return KnowsWritten(execute(plan), fences[-1], read)

    pair.p.executor.execute = ahead  # type: ignore[method-assign]
    return fences


def test_kv_is_announced_before_the_result_of_its_step_is_read():
    """Its head and its draws are still to come: a peer fetches meanwhile. Nothing is said twice."""
    pair = Pair(max_num_batched_tokens=16)
    upto: list[int] = []
    exports = pair.producer.exports
    fences = know_written(pair, lambda: upto.extend(each.upto for each in exports.values()))
    request = pair.prefill("a", 40)

    export = exports[request.key]
    assert upto == [16, 32, 40]
    assert export.fences == fences
    assert export.first is not None
    assert isinstance(KnowsWritten(Future(), FenceDone(), lambda: None), OnKVWritten)


def test_who_ended_while_a_step_computed_announces_nothing():
    """The step in flight is read all the same."""
    pair = Pair(max_num_batched_tokens=16, async_scheduling=True)
    know_written(pair, lambda: None)
    request = produce("a", 40)
    pair.p.add(request)
    pair.p.step()
    pair.p.core.abort(request.key)
    pair.p.step()

    assert pair.producer.exports[request.key].upto == 0


def test_a_producer_is_never_preempted():
    """Its prompt's blocks are its own until it ends, whatever others need."""
    pair = Pair(p_blocks=6, max_num_batched_tokens=16)
    other = request_of("b", 16, params=params_of(max_tokens=60, ignore_eos=True))
    pair.p.add(other)
    pair.p.step()
    request = pair.prefill("a", 60)

    assert pair.producer.exports[request.key].upto == 60
    pair.producer.release(request.key)
    pair.p.run()
    pair.p.check(other)
    pair.check_empty()


def test_quotas_refuse_or_hold_back_a_producer():
    """A full quota refuses; a lease that may not start yet parks and blocks nobody."""
    pair = Pair()
    pair.producer.quota = 1
    first, second = produce("a"), produce("b")
    pair.producer.may_start = False
    assert pair.p.add(first) is None
    assert pair.p.add(second) is RefusalCode.CAPACITY
    other = request_of("c")
    pair.p.add(other)
    for _ in range(12):
        pair.p.step()
    pair.p.check(other)
    assert pair.producer.exports[first.key].upto == 0

    pair.producer.may_start = True
    pair.p.step()
    assert pair.producer.exports[first.key].upto == 40
    pair.producer.release(first.key)
    pair.check_empty()


def test_a_handoff_that_may_not_start_is_still_in_the_queue():
    """A worker that drains gives it back: it holds nothing, and waits for its lease alone."""
    pair = Pair()
    pair.producer.may_start = False
    request = produce("a")
    pair.p.add(request)
    pair.p.step()
    assert pair.p.core.stats()["parked"] == 1
    assert pair.p.core.waiting_keys() == [request.key]

    pair.producer.may_start = True
    pair.p.step()
    assert pair.p.core.waiting_keys() == []
    pair.p.core.abort(request.key)
    pair.check_empty()


def test_tokens_of_handoffs_that_may_not_start_are_queued():
    """They count against the bound of the queue until they start, or go."""
    pair = Pair(max_num_queued_tokens=50)
    pair.producer.may_start = False
    first, second = produce("a"), produce("b")
    assert pair.p.add(first) is None
    pair.p.step()
    assert pair.p.add(second) is RefusalCode.CAPACITY
    pair.p.core.abort(first.key)
    pair.producer.release(first.key)
    assert pair.p.add(second) is None

    pair.producer.may_start = True
    pair.p.step()
    third = produce("c")
    assert pair.p.add(third) is None, "b has started"
    pair.p.core.abort(third.key)
    pair.producer.release(third.key)
    pair.producer.release(second.key)
    pair.check_empty()


def test_a_handoff_that_may_not_start_is_computed_here():
    """A report has it as prompt tokens that wait, none of them as KV that is to be brought; that is
    what it says of the other leg."""
    pair = Pair()
    pair.producer.may_start = False
    legs = [produce(name, 100) for name in "abc"]
    for leg in legs:
        pair.p.add(leg)
        pair.d.add(consume(leg.key.request, 100))
    pair.p.step()
    pair.d.step()
    loads = [side.core.load_report() for side in (pair.p, pair.d)]
    assert [(each.waiting_tokens, each.loading_tokens) for each in loads] == [(300, 0), (300, 300)]

    pair.p.core.abort(legs[0].key)
    pair.d.core.abort(legs[0].key)
    loads = [side.core.load_report() for side in (pair.p, pair.d)]
    assert [(each.waiting_tokens, each.loading_tokens) for each in loads] == [(200, 0), (200, 200)]


def test_tokens_of_handoffs_whose_kv_is_late_are_queued():
    pair = Pair(max_num_queued_tokens=50)
    request = consume("a")
    assert pair.d.add(request) is None
    pair.d.step()
    assert pair.d.add(consume("b")) is RefusalCode.CAPACITY
    pair.consumer.ready[request.key] = 40
    pair.d.step()
    assert pair.d.add(consume("b")) is None


def test_a_revoked_producer_stops():
    """A lease revoked in mid-prompt fails the attempt; its blocks wait for Released."""
    pair = Pair(max_num_batched_tokens=16)
    request = produce("a", 60)
    pair.p.add(request)
    pair.p.step()
    revoked = ConsumerSide()
    revoked.fail(request.key, blocks_free=False)
    pair.producer.events += revoked.events
    pair.p.step()

    assert [each.request for each in pair.p.failed] == ["a"]
    assert pair.p.core.stats()["held_blocks"] == 4
    pair.producer.release(request.key)
    pair.check_empty()


def test_aborted_producers_keep_their_promise():
    """An abort in mid-prompt hands the blocks to the connector, which frees them when it may."""
    pair = Pair(max_num_batched_tokens=16)
    request = produce("a", 60)
    pair.p.add(request)
    pair.p.step()

    pair.p.core.abort(request.key)

    assert pair.producer.exports[request.key].why == "abort"
    assert pair.p.core.stats()["held_blocks"] == 4
    pair.producer.release(request.key)
    pair.check_empty()


@pytest.mark.parametrize("who", ["a cancel", "its router is lost"])
def test_what_was_handed_over_is_let_go_of_when_nobody_wants_it(who):
    """The engine has forgotten the key; the connector, which keeps its blocks, hears of it."""
    pair = Pair()
    mine, other = pair.prefill("a"), pair.prefill("b", router=b"o" * 16)
    core = pair.p.core
    if who == "a cancel":
        assert not core.abort(mine.key)
    else:
        assert core.abort_router(mine.key.router) == 0
    pair.p.step()
    assert list(core.scheduler.request_table.held) == [other.key]
    pair.producer.release(other.key)
    pair.check_empty()
