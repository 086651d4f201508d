"""Who gets blocks first on a full worker: what came first, be it in the queue or handed over.

A request whose turn it is starts within a number of steps that follows from what runs: a prompt in
chunks, the longest output, and a load. Hand-offs that go on for ever change nothing about that.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.line import Line, Traffic
from tests.engine_plan.pair import consume

from tandem.engine.request import RequestState
from tandem.engine.scheduler import remote
from tandem.engine.scheduler.remote import Turns
from tandem.protocol.errors import FailCause


def bound_of(traffic: Traffic) -> int:
    """Steps after which all that ran when a request's turn came has ended: chunks of what they
    have to compute (again), their outputs, and their loads."""
    chunks = traffic.seats * (traffic.longest_prompt + traffic.longest_output) // 64
    return chunks + traffic.longest_output + 3 * traffic.load_steps + 8


traffics = st.builds(
    Traffic,
    seed=st.integers(0, 1000),
    num_blocks=st.integers(8, 24),
    seats=st.sampled_from((2, 4, 8)),
    watermark=st.sampled_from((0.0, 0.1)),
    overlap=st.booleans(),
    whole_share=st.sampled_from((0.0, 0.1, 0.5, 0.9)),
    ready_share=st.sampled_from((0.2, 0.8, 1.0)),
)


@pytest.mark.full
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(traffics)
def test_a_request_whose_turn_it_is_starts_while_hand_offs_go_on(traffic):
    """However many hand-offs are ready, the first in line waits for what runs and no longer."""
    line = Line(traffic)
    line.run(300)
    assert max(line.waited.values(), default=0) <= bound_of(traffic)
    line.drain()
    for request in line.requests.values():
        line.harness.check(request)
    line.harness.check_empty()


def test_a_preempted_request_goes_before_hand_offs_that_came_later():
    """Its arrival counts, not when it lost its blocks; what it needs is left to it."""
    line = Line(Traffic(num_blocks=8))
    harness, side = line.harness, line.side
    long = params_of(max_tokens=60, ignore_eos=True)
    for name in "ab":
        harness.add(request_of(name, 40, params=long))
    late = consume("late", 16)
    harness.add(late)
    harness.step()
    while not len(harness.core.scheduler.request_table.waiting):
        harness.step()
    side.ready[late.key] = 16
    (preempted,) = harness.core.scheduler.request_table.waiting.in_order()
    assert preempted.state is RequestState.PREEMPTED
    while preempted in harness.core.scheduler.request_table.waiting:
        assert late.key not in side.loads
        harness.step()
    assert preempted in harness.core.scheduler.request_table.running


def test_who_is_behind_a_hand_off_that_finds_no_room_is_not_looked_up(monkeypatch):
    """A full worker has many that are ready: a look at each in every step costs their prompts'
    length, and says what the first one's said already."""
    line = Line(Traffic(seats=1))
    harness, side = line.harness, line.side
    harness.add(request_of("runs", 8, params=params_of(max_tokens=30, ignore_eos=True)))
    harness.step()
    for number in range(50):
        late = consume(f"late{number}", 16)
        harness.add(late)
        side.ready[late.key] = 16
    manager, looked = harness.core.scheduler.manager, []
    find = manager.find_cached_prefix

    def noted(request, max_tokens):
        looked.append(request.key.request)
        return find(request, max_tokens)

    monkeypatch.setattr(manager, "find_cached_prefix", noted)
    harness.step()
    assert looked == ["late0"]
    assert len(side.local) == 50, "whether they are ready is asked of all"


def test_who_is_behind_a_hand_off_that_finds_no_room_waits_too():
    """Small requests that came later do not take, one by one, what a large hand-off waits for."""
    line = Line(Traffic(num_blocks=8))
    harness, side = line.harness, line.side
    harness.add(request_of("runs", 60, params=params_of(max_tokens=30, ignore_eos=True)))
    harness.step()
    large = consume("large", 80)
    harness.add(large)
    side.ready[large.key] = 80
    harness.add(request_of("small", 5))
    for _ in range(10):
        harness.step()
    assert [out for out in harness.outputs if out.request == "small"] == []
    while large.key not in side.loads:
        harness.step()
    harness.step()
    assert [out for out in harness.outputs if out.request == "small"] != []


def test_a_hand_off_that_is_not_announced_holds_up_nobody():
    """Neither the queue nor hand-offs that came later wait for KV that P has not computed."""
    line = Line(Traffic(num_blocks=8))
    early, late = consume("early", 90), consume("late", 20)
    for request in (early, late, request_of("whole", 20)):
        line.harness.add(request)
    line.side.ready[late.key] = 20
    line.harness.step()
    assert late.key in line.side.loads
    assert [out.request for out in line.harness.outputs] == ["whole"]


def test_hand_offs_leave_the_watermark():
    """Beside others that run, a hand-off takes no block that is kept for their growth."""
    line = Line(Traffic(num_blocks=10, watermark=0.3))
    harness = line.harness
    harness.add(request_of("runs", 70, params=params_of(max_tokens=4)))
    harness.step()
    late = consume("late", 20)
    harness.add(late)
    line.side.ready[late.key] = 20
    harness.step()
    assert late.key not in line.side.loads
    while harness.core.holds(request_of("runs").key):
        harness.step()
    harness.step()
    assert late.key in line.side.loads


def test_decodes_behind_a_prompt_leave_it_a_token():
    """Hand-offs that join for ever cannot take the whole step from a prompt that has begun."""
    line = Line(Traffic(num_blocks=64))
    harness = Harness(64, connector=line.side, max_num_batched_tokens=4, max_num_seqs=16)
    line.harness = harness
    prompt = request_of("prompt", 60)
    harness.add(prompt)
    for number in range(8):
        late = consume(f"late{number}", 5, params=params_of(max_tokens=500, ignore_eos=True))
        harness.add(late)
        line.requests[late.key] = late
        line.side.ready[late.key] = 5
    for _ in range(90):
        line.turn()
    assert harness.finish("prompt") is not None


class Overtaking(Turns):
    """What was: whoever is handed over takes what is free, before anybody who waits."""

    def may_reserve(self, request, hits, count, *, extra, num_loaded):
        """As long as there is a seat and blocks, the watermark's included."""
        manager = self._request_table.manager
        fits = manager.can_start(hits, count, extra=extra, num_loaded=num_loaded)
        return self._free_seats > 0 and fits

    def may_start(self, request):
        return True


STORM = Traffic(seed=3, num_blocks=16, whole_share=0.1, ready_share=1.0)


def starved(steps: int) -> tuple[int, int]:
    """For how long one request was first in line, and how many hand-offs passed it by."""
    line = Line(STORM)
    line.run(steps)
    return max(line.waited.values(), default=0), line.served


def test_without_the_line_a_preempted_stream_starves(monkeypatch):
    """The simulator finds it: with the order as it was, one waits for as long as anybody looks."""
    assert starved(600)[0] <= bound_of(STORM)
    monkeypatch.setattr(remote, "Turns", Overtaking)
    waited, passed = starved(600)
    assert waited > 3 * bound_of(STORM)
    assert passed > 50


CROWD = Traffic(
    seed=1, seats=12, longest_prompt=16, longest_output=20, whole_share=0.0, ready_share=1.0
)
"""Small hand-offs without an end."""


@pytest.mark.parametrize("order", [Turns, Overtaking])
def test_a_large_request_is_not_kept_out_by_small_hand_offs(monkeypatch, order):
    """Each block that is given back goes to whoever is next in line: a small one that came later
    would always take it, and did."""
    monkeypatch.setattr(remote, "Turns", order)
    line = Line(CROWD)
    line.run(50)
    large = request_of("large", 150)
    assert line.harness.add(large) is None
    line.requests[large.key] = large
    passed = line.served
    line.run(600)
    started = any(output.request == "large" for output in line.harness.outputs)
    print(f"\n{order.__name__}: started {started}, {line.served - passed} hand-offs meanwhile")
    assert started is (order is Turns)


def test_a_hand_off_that_never_finds_room_gives_the_line_free():
    """Its deadline ends it, and who is behind it starts."""
    line = Line(Traffic(num_blocks=8))
    harness, side = line.harness, line.side
    harness.add(request_of("runs", 60, params=params_of(max_tokens=60, ignore_eos=True)))
    harness.step()
    large = consume("large", 80, budget_ms=100)
    harness.add(large)
    side.ready[large.key] = 80
    harness.add(request_of("small", 5))
    for _ in range(8):
        harness.step()
    assert harness.tokens("small") == []
    for _ in range(8):
        harness.step()
    assert [each.cause for each in harness.failed] == [FailCause.TIMEOUT]
    assert harness.tokens("small") != []
