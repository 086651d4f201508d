"""Prompts go to a decode worker whole where a hand-off would have them queue."""

from __future__ import annotations

import asyncio

import pytest
from tests.router.builders import Stack, inc, make_request, view
from tests.waiting import until

from tandem.protocol.card import WorkerRole
from tandem.router.placement.prefix_load import PrefixLoadPolicy
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, LinkPace, PromptFacts

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
PROMPT = PromptFacts(num_tokens=2000)
RATE = 40_000.0
PAIR = (inc(1), inc(2))


def is_handed_off(producer=None, consumer=None, pace=None, prompt=PROMPT, patience=0.5):
    """Where the policy sends a prompt, with one worker of each role; and why."""
    fields = {"prefill_tokens_per_s": RATE, **(producer or {})}
    fleet = FleetSnapshot(
        (view(1, P, **fields), view(2, D, max_num_seqs=256, **(consumer or {}))),
        frozenset([PAIR]),
        {PAIR: pace or LinkPace()},
    )
    placement = PrefixLoadPolicy(16, patience).place(prompt, fleet, 0.0, Exclusions())
    assert placement is not None
    return placement.prefill is not None, placement.rule


def test_a_prefill_worker_that_is_seconds_behind_is_spared():
    """What waits there counts in seconds of its own measured rate, and the reason is said."""
    assert is_handed_off({"waiting_tokens": 19_000})[0]
    whole, rule = is_handed_off({"waiting_tokens": 40_000})
    assert not whole
    assert rule == "a prefill worker and its link are 1.00 s behind, a decode worker needs 0.00 s"
    assert is_handed_off({"waiting_tokens": 40_000}, patience=1.1)[0]
    assert is_handed_off({"waiting_tokens": 40_000, "prefill_tokens_per_s": 0.0})[0]


def test_what_running_sequences_would_lose_is_counted_in():
    """Beside a hundred of them a prompt is not computed for the sake of half a second."""
    behind = {"waiting_tokens": 40_000}
    assert is_handed_off(behind, {"num_running": 100})[0]
    assert not is_handed_off(behind, {"num_running": 40})[0]
    assert not is_handed_off({"waiting_tokens": 80_000}, {"num_running": 100})[0]
    assert is_handed_off(behind, {"waiting_tokens": 30_000})[0]
    loading = {"waiting_tokens": 30_000, "loading_tokens": 30_000, "num_waiting": 200}
    assert not is_handed_off(behind, {**loading, "leg_tokens": 30_000, "num_legs": 200})[0]
    assert is_handed_off(behind, {**loading, "leg_compute_tokens": 30_000})[0]
    assert not is_handed_off(behind, {"waiting_tokens": 30_000, "prefill_tokens_per_s": 1e6})[0]


def test_a_link_that_is_behind_counts_like_a_queue():
    """Bytes that wait over the rate at which they come; unknown rates say nothing."""
    assert is_handed_off(pace=LinkPace(1e9, 400_000_000))[0]
    assert not is_handed_off(pace=LinkPace(1e9, 600_000_000))[0]
    assert is_handed_off(pace=LinkPace(0.0, 600_000_000))[0]


@pytest.mark.parametrize("state", [{"suspect": True}, {"free_share": 0.01, "num_running": 5}])
def test_decode_workers_that_are_full_or_fail_take_no_prompts_for_it(state):
    """They would preempt, or fail again."""
    assert is_handed_off({"waiting_tokens": 400_000}, state)[0]


def test_a_canary_goes_the_way_that_it_asked_for():
    """A wish for a shape is a wish for it under load, too."""
    wish = PromptFacts(num_tokens=2000, shape="disaggregated")
    assert is_handed_off({"waiting_tokens": 400_000}, prompt=wish)[0]


async def test_the_pace_of_links_comes_with_the_beats(make_worker):
    """As a decode worker measured it; nobody who waits for workers is woken for it."""
    producer, consumer = make_worker(P), make_worker(D)
    stack = Stack()
    await stack.find(producer, consumer)
    pair = (producer.incarnation, consumer.incarnation)
    assert stack.fleet.snapshot(0.0).paces[pair] == LinkPace()
    consumer.bytes_per_s, consumer.waiting_bytes = 2e9, 10**9
    await until(lambda: stack.fleet.snapshot(0.0).paces[pair].wait == 0.5)
    consumer.waiting_bytes = 5
    assert not await stack.pool.wait_change(0.3)
    await stack.close()


async def test_a_prompt_that_is_brought_is_no_work_of_the_decode_worker(make_worker):
    """Prompts wait at both workers of a hand-off, and are computed at one."""
    producer, consumer = make_worker(P, step=0.3), make_worker(D, step=0.3)
    stack = Stack()
    await stack.find(producer, consumer)
    task = asyncio.create_task(stack.run(make_request(40)))
    await until(lambda: producer.submitted and consumer.submitted)
    one, other = (stack.pool.workers[each.incarnation] for each in (producer, consumer))
    assert (one.leg_tokens, one.leg_compute_tokens) == (40, 40)
    assert (other.leg_tokens, other.leg_compute_tokens) == (40, 0)
    seen = {each.role: each.compute_tokens for each in stack.fleet.snapshot(0.0).workers}
    assert seen == {P: 40, D: 0}
    await task
    assert one.leg_compute_tokens == other.leg_compute_tokens == other.leg_tokens == 0
    await stack.close()
