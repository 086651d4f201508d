"""What a consuming scheduler reserves, parks and loads, and how a load ends."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from tests.engine_plan.builders import params_of, request_of
from tests.engine_plan.pair import Pair, consume

from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.protocol.errors import FailCause
from tandem.protocol.kv import FirstToken, Loaded, Released


def test_only_what_is_missing_is_loaded():
    """D pins its own prefix and asks for the rest; a full hit asks for token 1 alone."""
    pair = Pair()
    prompt = list(range(48))
    warm = request_of("warm", [*prompt[:40], 9, 9, 9])
    pair.d.add(warm)
    pair.d.run()
    pair.prefill("a", prompt)
    first = pair.reserve("a", prompt)
    assert pair.consumer.loads[first.key] == (((0, 1, 3, 4),), range(32, 48))
    assert pair.consumer.local[first.key] == 32
    pair.deliver(first)
    pair.d.run()

    pair.prefill("b", prompt)
    second = pair.reserve("b", prompt)
    assert pair.consumer.loads[second.key][1] == range(48, 48)
    pair.deliver(second)
    pair.d.run()

    for request in (first, second):
        pair.d.check(request)
    pair.check_empty()


def test_a_parked_request_blocks_nobody():
    """While one waits for its KV, later requests run; when it comes, it joins."""
    pair = Pair()
    parked = consume("late")
    pair.d.add(parked)
    other = request_of("now")
    pair.d.add(other)
    for _ in range(12):
        pair.d.step()
    pair.d.check(other)

    pair.prefill("late")
    pair.consumer.ready[parked.key] = 40
    pair.d.step()
    pair.deliver(parked)
    pair.d.run()

    pair.d.check(parked)
    pair.check_empty()


def test_a_step_looks_at_what_was_announced_and_not_at_all_that_is_parked():
    """A queue at the prefill worker costs the steps of streams here nothing; what is parked ends
    all the same: by its budget, by its client, by its link, and with its KV."""
    pair = Pair()
    parked = [consume(f"r{at}", budget_ms=60_000) for at in range(1000)]
    for request in parked:
        assert pair.d.add(request) is None
    pair.d.step()
    pair.prefill("r7")
    pair.d.step()
    looks = pair.consumer.num_looks
    pair.consumer.ready[parked[7].key] = 40
    for _ in range(3):
        pair.d.step()
    assert pair.consumer.num_looks - looks <= 2
    pair.deliver(parked[7])
    pair.d.core.abort(parked[8].key)
    pair.consumer.fail(parked[9].key)
    while pair.d.core.holds(parked[7].key):
        pair.d.step()
    pair.d.check(parked[7])
    assert [each.request for each in pair.d.failed] == ["r9"]
    pair.d.clock.now += 61
    pair.d.step()
    assert len(pair.d.failed) == 998
    assert pair.consumer.num_looks - looks <= 2
    pair.check_empty()


def test_short_blocks_keep_it_parked():
    """A ready request for which blocks are short waits, others go on, and it is tried again."""
    pair = Pair(d_blocks=6)
    other = request_of("now", 20, params=params_of(max_tokens=45, ignore_eos=True))
    pair.d.add(other)
    for _ in range(20):
        pair.d.step()
    pair.prefill()
    request = pair.reserve()
    assert request.key not in pair.consumer.loads

    while request.key not in pair.consumer.loads:
        pair.d.step()
    pair.d.check(other)
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)
    pair.check_empty()


def test_seats_are_kept_for_what_loads():
    """A loading request has its seat already: the batch never grows beyond its rows."""
    pair = Pair(max_num_seqs=1)
    pair.prefill("a")
    first = pair.reserve("a")
    pair.d.add(request_of("b"))
    second = consume("c")
    pair.d.add(second)
    pair.consumer.ready[second.key] = 40
    pair.d.step()
    assert pair.d.core.stats()["waiting"] == pair.d.core.stats()["parked"] == 1

    pair.deliver(first)
    while second.key not in pair.consumer.loads:
        pair.d.step()
    pair.prefill("c")
    pair.deliver(second)
    pair.d.run()
    for request in (first, second, request_of("b")):
        pair.d.check(request)
    pair.check_empty()


def test_decode_headroom_is_reserved():
    """A prompt that fills its blocks gets one more to decode into, before the load begins."""
    pair = Pair()
    pair.prefill("a", 32)
    request = pair.reserve("a", 32)

    assert len(pair.consumer.loads[request.key][0][0]) == 3
    pair.deliver(request)
    pair.d.run()
    pair.check_empty()


def test_a_prompt_that_fills_the_pool_still_loads():
    """Headroom is not asked for where the whole pool has none to give."""
    pair = Pair(d_blocks=3)
    pair.prefill("a", 40)
    request = pair.reserve("a", 40)

    assert len(pair.consumer.loads[request.key][0][0]) == 3
    pair.deliver(request)
    pair.d.run()
    pair.d.check(request)
    pair.check_empty()


@pytest.mark.parametrize("blocks_free", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_failed_load_says_so_and_frees(begun, blocks_free):
    """FAIL with the connector's cause; blocks that may still be written wait for Released."""
    pair = Pair()
    request = consume("a")
    pair.d.add(request)
    if begun:
        pair.consumer.ready[request.key] = 40
    pair.d.step()
    pair.consumer.keep_on_abort = False

    pair.consumer.fail(request.key, blocks_free=blocks_free)
    pair.d.step()

    assert [(each.cause, each.message) for each in pair.d.failed] == [
        (FailCause.PEER, "the peer is gone")
    ]
    if not blocks_free:
        assert pair.d.core.stats()["held_blocks"] == (4 if begun else 0)
        pair.consumer.release(request.key)
    pair.check_empty()


def test_an_abort_in_mid_load_waits_for_the_writes():
    """Blocks of an aborted load are not given to anybody before the connector lets go."""
    pair = Pair(d_blocks=6)
    request = pair.reserve()

    assert pair.d.core.abort(request.key)
    assert pair.d.core.stats()["free_blocks"] == 2
    assert pair.d.core.has_work
    other = request_of("b", 60)
    pair.d.add(other)
    assert not pair.d.step().progressed
    pair.consumer.release(request.key)
    pair.d.run()

    pair.d.check(other)
    pair.check_empty()


def test_an_abort_before_anything_was_reserved_is_quiet():
    """A parked request that is aborted leaves at once; what comes later is counted and dropped."""
    pair = Pair()
    request = consume("a")
    pair.d.add(request)
    pair.d.step()
    pair.d.core.abort(request.key)

    pair.consumer.events += [Loaded(request.key, (FirstToken(0, 1),)), Released(request.key)]
    pair.consumer.fail(request.key)
    plan = pair.d.core.scheduler.schedule()

    assert plan is None
    assert pair.d.core.scheduler.take_stats().late_events == 3
    assert (pair.d.outputs, pair.d.failed) == ([], [])
    pair.check_empty()


def test_a_commit_for_a_running_request_is_late():
    """A second Loaded for the same key changes nothing."""
    pair = Pair()
    pair.prefill()
    request = pair.reserve()
    pair.deliver(request)
    pair.d.step()
    pair.consumer.events.append(Loaded(request.key, (FirstToken(0, 49),)))
    pair.d.run()

    pair.d.check(request)
    pair.check_empty()


def test_budgets_end_parked_and_loading_requests():
    """A request whose KV does not come in time fails with TIMEOUT, wherever it waits."""
    pair = Pair()
    parked, loading = consume("a", budget_ms=50), consume("b", budget_ms=50)
    for request in (parked, loading):
        pair.d.add(request)
    pair.consumer.ready[loading.key] = 40
    pair.d.step()
    pair.d.clock.now += 1
    pair.d.step()

    assert {each.cause for each in pair.d.failed} == {FailCause.TIMEOUT}
    assert len(pair.d.failed) == 2
    pair.consumer.release(loading.key)
    pair.check_empty()


def test_a_load_waits_for_steps_that_may_still_write():
    """Blocks freed while a step in flight writes them are not loaded into before it is through."""
    pair = Pair(d_blocks=4, async_scheduling=True)
    long = request_of("long", 30, params=params_of(max_tokens=20, ignore_eos=True))
    pair.d.add(long)
    core = pair.d.core
    scheduler, execute = core.scheduler, pair.d.executor.execute
    plan = scheduler.schedule()
    assert plan is not None
    output = execute(plan).result()
    request = consume("a", 30)
    pair.d.add(request)
    pair.consumer.ready[request.key] = 30
    core.abort(long.key)

    assert scheduler.schedule() is None
    assert core.stats()["loading"] == 1
    assert request.key not in pair.consumer.loads
    scheduler.update_from_output(output)
    assert request.key in pair.consumer.loads


@pytest.mark.parametrize("ends", [False, True])
def test_what_came_is_findable_behind_its_first_step(ends):
    """Hundreds of blocks do not hold that step up; who ends in it leaves them findable."""
    pair = Pair(max_num_batched_tokens=64)
    params = params_of(max_tokens=2 if ends else 8, ignore_eos=True)
    pair.prefill("a", 40, params=params)
    leg = pair.reserve("a", 40, params=params)
    pair.deliver(leg)
    found = []
    execute = pair.d.executor.execute

    def noted(plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        found.append(pair.d.core.manager.pool.num_cached)
        return execute(plan)

    pair.d.executor.execute = noted  # type: ignore[method-assign]
    pair.d.step()
    assert found == [0]
    pair.d.step()
    full = 40 // pair.d.core.manager.block_size
    assert pair.d.core.manager.pool.num_cached == full
    pair.check_empty()
