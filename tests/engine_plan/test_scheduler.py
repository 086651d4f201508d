"""What a step holds: budget, order, chunks, preemption, forks; by exact rows and block ids."""

from tests.engine_plan.builders import Harness, request_of
from tests.engine_plan.plans import long_running, next_plan, shape_of


def test_prompts_are_cut_to_the_budget():
    """A long prompt runs in chunks; only the last one draws, and all blocks come at the start."""
    harness = Harness(max_num_batched_tokens=32)
    harness.add(request_of("a", 70))

    first, second, third, fourth = (next_plan(harness) for _ in range(4))

    assert shape_of(first) == [(0, 0, 32, ())]
    assert first.new[0].block_ids == ([0, 1, 2, 3, 4],)
    assert shape_of(second) == [(0, 32, 32, ())]
    assert second.new == ()
    assert shape_of(third) == [(0, 64, 6, (0,))]
    assert shape_of(fourth) == [(0, 70, 1, (0,))]


def test_decodes_go_before_chunks_and_share_the_budget():
    """A running decode gets its token first; the prompts of several requests take the rest."""
    harness = Harness(max_num_batched_tokens=16)
    harness.add(request_of("a", 4, params=long_running()))
    next_plan(harness)
    harness.add(request_of("b", 20))
    harness.add(request_of("c", 9))

    assert shape_of(next_plan(harness)) == [(0, 4, 1, (0,)), (1, 0, 15, ())]
    assert shape_of(next_plan(harness)) == [(0, 5, 1, (0,)), (1, 15, 5, (0,)), (2, 0, 9, (0,))]


def test_prompts_are_cut_shorter_beside_decodes():
    """A step with decodes holds fewer tokens, so that none of them waits long for its next."""
    harness = Harness(
        max_num_batched_tokens=64, least_mixed_tokens=9, max_num_seqs=8, mixed_tokens_per_decode=2
    )
    harness.add(request_of("a", 40, params=long_running()))
    harness.add(request_of("b", 40))

    assert shape_of(next_plan(harness)) == [(0, 0, 40, (0,)), (1, 0, 24, ())]
    assert shape_of(next_plan(harness)) == [(0, 40, 1, (0,)), (1, 24, 8, ())]
    assert shape_of(next_plan(harness)) == [(0, 41, 1, (0,)), (1, 32, 8, (0,))]
    assert harness.core.scheduler.take_stats().planned_tokens == 64 + 9 + 9


def test_long_prompts_leave_room_for_others():
    """The threshold bounds one prompt's chunk, so that a short one starts in the same step."""
    harness = Harness(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    harness.add(request_of("a", 30))
    harness.add(request_of("b", 5))

    assert shape_of(next_plan(harness)) == [(0, 0, 8, ()), (1, 0, 5, (0,))]


def test_seats_bound_the_batch():
    """No more sequences run than the ranks have rows for."""
    harness = Harness(max_num_seqs=2)
    for name in "abc":
        harness.add(request_of(name, 5, params=long_running(max_tokens=3)))

    assert len(next_plan(harness).rows) == 2
    harness.run()
    for request in harness.requests.values():
        harness.check(request)


def test_a_cached_prefix_is_not_computed():
    """A second request with the same prompt starts after the blocks that are cached, shares them,
    and says how many tokens it saved."""
    harness = Harness()
    prompt = list(range(40))
    harness.add(request_of("a", prompt))
    harness.run()
    harness.add(request_of("b", prompt))

    plan = next_plan(harness)

    assert shape_of(plan) == [(1, 32, 8, (0,))]
    assert plan.new[0].block_ids[0][:2] == [0, 1]
    harness.run()
    harness.check(request_of("b", prompt))
    cached = {out.request: out.num_cached_tokens for out in harness.outputs if out.position == 0}
    assert cached == {"a": 0, "b": 32}
    assert all(out.num_cached_tokens is None for out in harness.outputs if out.position)


def test_generated_tokens_are_cached_too():
    """The next turn of a conversation finds the answer to the last one in the cache."""
    harness = Harness()
    first = request_of("a", 20, params=long_running(max_tokens=30))
    harness.add(first)
    harness.run()
    harness.add(request_of("b", [*first.prompt_token_ids, *harness.tokens("a"), 1, 2]))

    assert shape_of(next_plan(harness))[0][1] == 48


def test_salts_keep_caches_apart():
    """Equal prompts under different salts share nothing."""
    harness = Harness()
    harness.add(request_of("a", list(range(40)), cache_salt="one"))
    harness.run()
    harness.add(request_of("b", list(range(40)), cache_salt="two"))

    assert shape_of(next_plan(harness))[0][1] == 0


def test_sent_hashes_are_taken_when_complete():
    """The router's hashes name the blocks; an incomplete list is computed here instead."""
    harness = Harness()
    prompt = list(range(40))
    harness.add(request_of("a", prompt, block_hashes=(b"x" * 16, b"y" * 16)))
    harness.run()
    assert {b"x" * 16, b"y" * 16} <= harness.stored

    harness.add(request_of("b", prompt, block_hashes=(b"x" * 16,)))
    assert shape_of(next_plan(harness))[0][1] == 0


def test_preemption_takes_the_latest_and_computes_it_again():
    """When blocks run out, the request that came last gives its own back, and says the same."""
    harness = Harness(4)
    for name in "ab":
        harness.add(request_of(name, 16, params=long_running(max_tokens=40)))
    plans = [next_plan(harness)]
    while not plans[-1].dropped:
        plans.append(next_plan(harness))

    assert plans[-1].dropped == (1,)
    assert shape_of(plans[-1]) == [(0, 32, 1, (0,))]
    assert plans[-1].rows[0].new_block_ids == ((3,),)
    harness.run()
    for request in harness.requests.values():
        harness.check(request)
    harness.check_empty()


def test_a_token_in_flight_holds_back_its_preempted_sequence():
    """A sequence preempted while a step still draws its token starts again only with that token."""
    harness = Harness(2)
    first, second = (
        request_of(name, size, params=long_running()) for name, size in (("a", 15), ("b", 16))
    )
    harness.add(first)
    harness.add(second)
    scheduler, execute = harness.core.scheduler, harness.executor.execute
    plans = [scheduler.schedule(), scheduler.schedule()]
    outputs = [execute(plan).result() for plan in plans if plan is not None]
    assert harness.core.stats()["waiting"] == 1

    harness.core.abort(first.key)
    assert scheduler.schedule() is None
    for output in outputs:
        scheduler.update_from_output(output)
    plan = scheduler.schedule()
    assert plan is not None
    assert len(plan.new[0].token_ids) == 17
    scheduler.update_from_output(execute(plan).result())
    harness.run()
    harness.check(second)


def test_priority_decides_who_runs_and_who_is_preempted():
    """Under the priority policy a lower number starts first and keeps its blocks."""
    harness = Harness(4, policy="priority")
    harness.add(request_of("a", 16, params=long_running(max_tokens=40), priority=5))
    harness.add(request_of("b", 16, params=long_running(max_tokens=40), priority=1))

    first = next_plan(harness)
    assert [new.seq for new in first.new] == [1, 0]
    harness.run()
    ended = [out.request for out in harness.outputs if out.finish is not None]
    assert ended == ["b", "a"]
    for request in harness.requests.values():
        harness.check(request)


def test_an_urgent_latecomer_goes_before_those_that_run():
    """Its rows come first, and those that run already are the ones to be preempted for it."""
    harness = Harness(4, policy="priority")
    params = long_running(max_tokens=40)
    harness.add(request_of("a", 16, params=params, priority=5))
    next_plan(harness)
    harness.add(request_of("b", 16, params=params, priority=1))
    next_plan(harness)

    assert [row.seq for row in next_plan(harness).rows] == [1, 0]
    harness.run()
    ended = [out.request for out in harness.outputs if out.finish is not None]
    assert ended == ["b", "a"]


def test_fcfs_knows_no_priority():
    harness = Harness()
    harness.add(request_of("a", 16, priority=5))
    harness.add(request_of("b", 16, priority=1))

    assert [new.seq for new in next_plan(harness).new] == [0, 1]


def test_a_head_without_room_waits_for_it():
    """The first in the queue is not overtaken by a smaller one behind it."""
    harness = Harness(5)
    harness.add(request_of("a", 40, params=long_running(max_tokens=4)))
    next_plan(harness)
    harness.add(request_of("b", 60, params=long_running(max_tokens=4)))
    harness.add(request_of("c", 5))

    assert len(next_plan(harness).rows) == 1
    harness.run()
    order = [out.request for out in harness.outputs if out.position == 0]
    assert order == ["a", "b", "c"]


def test_the_watermark_holds_back_new_requests_only():
    """Spare blocks are not given to a newcomer while others run, and never block the only one."""
    harness = Harness(10, watermark=0.3)
    harness.add(request_of("a", 16 * 9, params=long_running(max_tokens=4)))
    while harness.core.scheduler.make_stats().waiting:
        next_plan(harness)
    assert harness.core.manager.num_free == 1

    harness.add(request_of("b", 5))
    harness.run()
    assert [out.request for out in harness.outputs if out.position == 0] == ["a", "b"]
