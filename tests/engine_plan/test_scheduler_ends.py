"""Budgets, aborts and limits of the queue."""

from tests.engine_plan.builders import Harness, request_of
from tests.engine_plan.plans import long_running, next_plan

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
    assert harness.core.scheduler.plan() is None
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
