"""Budgets, aborts and limits of the queue."""

import weakref
from typing import Any

import pytest
from msgspec import structs
from tests.engine_plan.builders import Harness, request_of
from tests.engine_plan.plans import long_running, next_plan

from tandem.engine.scheduler.request_table import SLACK
from tandem.protocol.errors import FailCause, RefusalCode


def test_spent_budgets_end_a_request_anywhere():
    """Waiting or running, a request whose budget is spent fails with the cause and frees all."""
    harness = Harness(4, max_num_seqs=1)
    harness.add(request_of("run", 16, params=long_running(max_tokens=40), budget_ms=1000))
    harness.add(request_of("wait", 16, budget_ms=500))
    harness.add(request_of("free", 16))
    next_plan(harness)

    harness.clock.now += 0.6
    harness.step()
    assert [(each.request, each.cause) for each in harness.failed] == [("wait", FailCause.TIMEOUT)]
    harness.clock.now += 0.6
    harness.run()

    assert [each.request for each in harness.failed] == ["wait", "run"]
    harness.check(request_of("free", 16))
    harness.check_empty()


def test_aborts_free_everything_in_any_state():
    """Waiting, in mid-prompt, running and forked: an abort leaves nothing behind."""
    harness = Harness(20, max_num_batched_tokens=32)
    requests = [
        request_of("done", 8, params=long_running(n=2, temperature=1.0)),
        request_of("chunk", 100),
        request_of("wait", 10),
    ]
    for request in requests:
        harness.add(request)
    next_plan(harness)
    next_plan(harness)

    for request in requests:
        assert harness.core.abort(request.key)
        assert not harness.core.abort(request.key)
        harness.core.check_integrity()
    assert harness.core.scheduler.schedule() is None
    assert harness.core.manager.num_free == 20


def test_forks_aborted_before_their_copy_are_forgotten():
    """An abort between fork and copy drops the copy, and the source is free."""
    harness = Harness()
    request = request_of("a", 20, params=long_running(n=4, temperature=1.0))
    harness.add(request)
    next_plan(harness)

    harness.core.abort(request.key)

    harness.core.check_integrity()
    assert harness.core.manager.take_copies() == ()
    assert harness.core.manager.num_free == 64


class Prompt(list[int]):
    """A list that a weak reference may be to."""


def test_aborted_requests_leave_the_queue_wholly():
    """However many come and go while all seats are taken, prompts go with them, and what is left
    of the others keeps its order."""
    harness = Harness(max_num_seqs=1)
    harness.add(request_of("run", 8, params=long_running(max_tokens=40)))
    next_plan(harness)
    harness.add(request_of("first"))
    waiting = harness.core.scheduler.request_table.waiting
    for number in range(400):
        request = request_of(f"gone{number}")
        prompt = Prompt(request.prompt_token_ids)
        gone = weakref.ref(prompt)
        harness.core.add(structs.replace(request, prompt_token_ids=prompt))
        del prompt
        harness.core.abort(request.key)
        assert gone() is None, f"the prompt of request {number} is kept"
    harness.add(request_of("last"))

    assert [each.request_id for each in waiting.in_order()] == ["first", "last"]
    assert len(waiting._heaps[""].entries) <= 2 * len(waiting) + SLACK
    harness.run()
    harness.check_empty()


def test_discards_do_not_disturb_who_reads_the_queue():
    """A step that looks along the queue may end those it has not come to."""
    harness = Harness(max_num_seqs=1)
    harness.add(request_of("run", 8, params=long_running(max_tokens=40)))
    next_plan(harness)
    keys = [request_of(f"r{number}") for number in range(200)]
    for request in keys:
        harness.add(request)
    reading = harness.core.scheduler.request_table.waiting.in_order()
    assert next(reading).request_id == "r0"

    for request in keys[1:-1]:
        harness.core.abort(request.key)

    assert [each.request_id for each in reading] == ["r199"]


def test_deadlines_go_with_their_requests():
    """Requests that end early leave no deadline behind until it comes, and a key that is used again
    has its own."""
    harness = Harness()
    request_table = harness.core.scheduler.request_table
    for _ in range(200):
        harness.add(request_of("a", 4, budget_ms=600_000))
        harness.core.abort(request_of("a").key)
    harness.add(request_of("b", 4, params=long_running(), budget_ms=600_000))
    harness.add(request_of("a", 4, params=long_running(), budget_ms=1000))

    assert len(request_table._deadlines) <= 2 * len(request_table.groups) + SLACK + 1
    harness.clock.now += 1.0
    harness.step()
    assert [(each.request, each.cause) for each in harness.failed] == [("a", FailCause.TIMEOUT)]
    harness.clock.now += 600.0
    harness.run()
    assert [each.request for each in harness.failed] == ["a", "b"]


def test_queue_limits_refuse():
    """Requests and tokens that wait are bounded; an empty queue takes any prompt."""
    harness = Harness(max_num_queued_reqs=2)
    assert [harness.add(request_of(name)) for name in "abc"] == [None, None, RefusalCode.CAPACITY]

    harness = Harness(max_num_queued_tokens=50)
    codes = [
        harness.add(request_of(name, size)) for name, size in zip("abc", (60, 1, 1), strict=True)
    ]
    assert codes == [None, RefusalCode.CAPACITY, RefusalCode.CAPACITY]
    harness.run()
    assert harness.add(request_of("c", 40)) is None
    assert harness.add(request_of("d", 10)) is None


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("bound", [{"max_num_queued_reqs": 2}, {"max_num_queued_tokens": 100}])
def test_choices_without_a_seat_are_no_requests_that_wait(bound: dict[str, Any], caching: bool):
    """One request of many choices keeps nobody out while it decodes: what it has computed lies in
    the cache, where there is one. So has one that is resumed."""
    params = long_running(n=6, max_tokens=30, temperature=1.0)
    for forced, emitted in enumerate([(), ((1,),) * 6]):
        harness = Harness(64, max_num_seqs=2, enable_prefix_caching=caching, **bound)
        harness.add(request_of("a", 40, params=params, emitted=emitted))
        for _ in range(4):
            harness.step()
        load = harness.core.load_report()
        assert (load.num_running, load.num_waiting) == (2, 4)
        assert load.waiting_tokens == 4 * (forced + (0 if caching else 40))
        assert [harness.add(request_of(name, 40)) for name in "bc"] == [None, None]
        assert harness.core.load_report().waiting_tokens == load.waiting_tokens + 80
        assert harness.add(request_of("d", 40)) is RefusalCode.CAPACITY


def test_preempted_requests_are_none_that_wait():
    """They had their first step: the bounds are of those that had none."""
    harness = Harness(8, max_num_seqs=4, max_num_queued_reqs=1)
    for name in "abc":
        assert harness.add(request_of(name, 30, params=long_running(max_tokens=60))) is None
        harness.step()
    for _ in range(25):
        harness.step()
    assert harness.core.stats()["waiting"] == 1
    assert harness.core.load_report().waiting_tokens == 0
    assert harness.add(request_of("d", 4)) is None
    assert harness.add(request_of("e", 4)) is RefusalCode.CAPACITY
