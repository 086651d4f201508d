"""Tenants share an engine: its queue, its seats, its blocks and the prompt tokens of its steps."""

from __future__ import annotations

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of

from tandem.engine.request import Request
from tandem.engine.scheduler.planner import RECENT_SECONDS
from tandem.engine.scheduler.request_table import WaitingQueue
from tandem.protocol.requests import EngineCoreRequest


def long_request(name: str, tenant: str, prompt: int = 20, tokens: int = 60) -> EngineCoreRequest:
    """A request that generates all its tokens."""
    params = params_of(max_tokens=tokens, ignore_eos=True)
    return request_of(name, prompt, params=params, tenant=tenant)


def running(harness: Harness) -> list[str]:
    return [each.request_id for each in harness.core.scheduler.request_table.running]


def finish(harness: Harness, requests: list[EngineCoreRequest]) -> None:
    """Run to the end, and check every answer and all blocks."""
    harness.run()
    for each in requests:
        harness.check(each)
    harness.check_empty()


def test_a_tenants_request_does_not_wait_for_all_of_another() -> None:
    """The queue serves tenants by turns, each in its own order."""
    harness = Harness(max_num_seqs=1)
    hog = [long_request(f"h{number}", "hog", tokens=2) for number in range(9)]
    victim = [long_request(f"v{number}", "victim", tokens=2) for number in range(2)]
    for each in (*hog, *victim):
        harness.add(each)
    begun: list[str] = []
    while harness.core.scheduler.has_requests:
        harness.step()
        begun += [each for each in running(harness) if each not in begun]
    assert begun.index("v1") <= 4
    assert [each for each in begun if each[0] == "h"] == [f"h{number}" for number in range(9)]


@pytest.mark.parametrize("blocks", [64, 12])
def test_a_tenant_below_its_part_takes_a_seat_of_one_above_it(blocks: int) -> None:
    """Or blocks, where these are short; what is preempted goes on later, with the same answer."""
    harness = Harness(num_blocks=blocks, max_num_seqs=4, max_num_batched_tokens=256)
    hog = [long_request(f"h{number}", "hog") for number in range(8)]
    for each in hog:
        harness.add(each)
    for _ in range(8):
        harness.step()
    victim = [long_request(f"v{number}", "victim", tokens=8) for number in range(3)]
    for each in victim:
        harness.add(each)
    for _ in range(3):
        harness.step()
    names = running(harness)
    assert [each for each in names if each[0] == "v"] == ["v0", "v1"]
    assert any(each[0] == "h" for each in names)
    finish(harness, [*hog, *victim])


def test_a_tenant_takes_a_seat_of_choices() -> None:
    """Choices that waited for a seat after their prompt are preempted for a tenant like others."""
    harness = Harness(num_blocks=800, max_num_seqs=8, max_num_batched_tokens=256)
    params = params_of(max_tokens=30, ignore_eos=True, n=24)
    harness.add(request_of("hog", 20, params=params, tenant="hog"))
    request_table = harness.core.scheduler.request_table
    while not request_table.running or not all(
        each.num_preemptions for each in request_table.running
    ):
        harness.step()
    assert len(request_table.running) == 8
    victim = long_request("victim", "victim", tokens=4)
    harness.add(victim)
    for _ in range(3):
        harness.step()
    assert "victim" in running(harness)
    harness.run()
    harness.check(victim)
    harness.check_empty()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("prompts", [[(75,), (75,)], [(40, 40), (40, 40)], [(75,), (75,), (75,)]])
def test_tenants_that_need_more_than_their_parts_all_finish(
    prompts: list[tuple[int, ...]], caching: bool
) -> None:
    """They do not preempt each other forever."""
    harness = Harness(
        num_blocks=8, max_num_batched_tokens=16, max_num_seqs=6, enable_prefix_caching=caching
    )
    requests = []
    for tenant, lengths in enumerate(prompts):
        for number, length in enumerate(lengths):
            name = f"{tenant}-{number}"
            requests.append(long_request(name, f"t{tenant}", prompt=length, tokens=4))
            harness.add(requests[-1])
        harness.step()
    for _ in range(200):
        harness.step()
    assert not harness.core.has_work
    for each in requests:
        harness.check(each)
    harness.check_empty()


def test_prompt_tokens_of_a_step_are_divided() -> None:
    """A short prompt does not wait for the chunks of a long one."""
    harness = Harness(num_blocks=200, max_num_batched_tokens=64)
    long = long_request("long", "hog", prompt=1000, tokens=2)
    harness.add(long)
    harness.step()
    short = long_request("short", "victim", prompt=30, tokens=2)
    harness.add(short)
    harness.step()
    (first,) = [
        each for each in harness.core.scheduler.request_table.running if each.request_id == "short"
    ]
    assert first.num_computed >= 30
    finish(harness, [long, short])


def test_a_step_with_prompts_of_several_tenants_is_a_short_one() -> None:
    """As one with decodes: it is over soon for the tenant that has little to compute."""
    harness = Harness(num_blocks=200, max_num_batched_tokens=512, least_mixed_tokens=80)
    long = long_request("long", "hog", prompt=2000, tokens=2)
    harness.add(long)
    harness.step()
    (running,) = harness.core.scheduler.request_table.running
    before = running.num_computed
    assert before >= 512
    short = long_request("short", "victim", prompt=30, tokens=2)
    harness.add(short)
    while harness.core.scheduler.request_table.waiting.peek() is not None:
        before = running.num_computed
        harness.step()
    assert running.num_computed - before <= 80
    finish(harness, [long, short])


def test_steps_stay_short_while_another_tenant_may_send_more() -> None:
    """A tenant whose prompts fill several steps gets short ones, until the others are silent."""
    harness = Harness(num_blocks=800, max_num_batched_tokens=512, least_mixed_tokens=80)
    long = long_request("long", "hog", prompt=2000, tokens=2)
    harness.add(long)
    computed = [0]
    (request,) = harness.core.scheduler.request_table.waiting.in_order()

    def step() -> int:
        harness.step()
        computed.append(request.num_computed)
        return computed[-1] - computed[-2]

    assert step() == 512
    harness.add(long_request("short", "victim", prompt=30, tokens=1))
    while len(harness.core.scheduler.request_table.tenants) > 1:
        step()
    assert step() == 80
    harness.clock.now += RECENT_SECONDS
    assert step() == 512


def test_a_tenant_that_computes_little_has_full_steps() -> None:
    """A prompt that one step takes whole is not cut because another tenant was here."""
    harness = Harness(num_blocks=200, max_num_batched_tokens=512, least_mixed_tokens=80)
    harness.add(long_request("short", "victim", prompt=30, tokens=1))
    harness.run()
    harness.add(long_request("long", "hog", prompt=500, tokens=2))
    (request,) = harness.core.scheduler.request_table.waiting.in_order()
    harness.step()
    assert request.num_computed == 500


def test_a_cached_prompt_counts_by_what_is_left_of_it() -> None:
    """A long prompt that is cached makes a short step, too."""
    harness = Harness(num_blocks=200, max_num_batched_tokens=512, least_mixed_tokens=80)
    cached = [index % 50 for index in range(300)]
    params = params_of(max_tokens=1)
    harness.add(request_of("first", cached, params=params, tenant="victim"))
    harness.run()
    long = long_request("long", "hog", prompt=2000, tokens=2)
    harness.add(long)
    harness.step()
    (running,) = harness.core.scheduler.request_table.running
    harness.add(request_of("again", cached, params=params, tenant="victim"))
    before = running.num_computed
    while harness.core.scheduler.request_table.waiting.peek() is not None:
        before = running.num_computed
        harness.step()
    assert running.num_computed - before <= 80
    harness.run()


def test_what_a_tenant_does_not_need_goes_to_the_other() -> None:
    harness = Harness(num_blocks=200, max_num_batched_tokens=64)
    long = long_request("long", "hog", prompt=640, tokens=2)
    short = long_request("short", "victim", prompt=10, tokens=2)
    for each in (long, short):
        harness.add(each)
    harness.step()
    computed = {
        each.request_id: each.num_computed for each in harness.core.scheduler.request_table.running
    }
    assert computed == {"long": 54, "short": 10}
    finish(harness, [long, short])


def test_one_tenant_is_served_by_arrival_whatever_it_costs() -> None:
    plans = []
    for tenant in ("", "only"):
        harness = Harness(num_blocks=40, max_num_seqs=3)
        requests = [
            long_request(f"r{number}", tenant, prompt=prompt, tokens=9)
            for number, prompt in enumerate((200, 5, 90, 3, 150, 40))
        ]
        for each in requests:
            harness.add(each)
        seen = []
        while harness.core.scheduler.has_requests:
            harness.step()
            request_table = harness.core.scheduler.request_table
            seen.append([(each.request_id, each.num_computed) for each in request_table.running])
        plans.append(seen)
    assert plans[0] == plans[1]


def test_a_queue_of_several_tenants_is_read_in_one_order() -> None:
    """Whichever of them goes first now; one that is passed over keeps its place."""
    harness = Harness(max_num_seqs=1)
    for name, tenant in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("c0", "c")):
        harness.add(long_request(name, tenant))
    queue: WaitingQueue = harness.core.scheduler.request_table.waiting

    def name_of(request: Request | None) -> str:
        return "" if request is None else request.request_id

    ordered = [each.request_id for each in queue.in_order()]
    assert sorted(ordered) == ["a0", "a1", "b0", "c0"]
    assert ordered.index("b0") < ordered.index("a1")
    queue.first_tenants = {"c"}
    assert name_of(queue.peek()) == "c0"
    queue.passed_over = {"c", "b"}
    assert name_of(queue.peek()) == "a0"
    queue.passed_over = {"a", "b", "c"}
    assert queue.peek() is None
    queue.passed_over = queue.first_tenants = frozenset()
    assert len(queue) == 4
    assert name_of(queue.pop()) == ordered[0]
