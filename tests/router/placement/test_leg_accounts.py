"""What a router counts on its workers: who computes, who decodes, and how much waits."""

from __future__ import annotations

import asyncio
import threading

import pytest
from msgspec.structs import replace
from tests.router.behaviours import behind, has_read
from tests.router.builders import Stack, make_request
from tests.waiting import until

from tandem.protocol.card import KVKind, KVLayout, WorkerRole
from tandem.protocol.ids import RequestKey
from tandem.protocol.messages import Beat, LoadReport, WorkerBeat
from tandem.router.dispatch.attempt import Attempt
from tandem.router.placement.policy import Placement

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
NOTHING = LoadReport(num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=9, total_blocks=9)


async def test_a_handed_over_leg_ends_with_token_1_and_the_other_decodes(make_worker):
    """A prefill worker is through with a prompt when its decode worker goes on with it."""
    stack, none_streams, one_streams = Stack(), threading.Event(), threading.Event()
    steps = behind(
        lambda turn: none_streams.is_set() and has_read(stack)(turn),
        lambda _: one_streams.is_set(),
    )
    producer, consumer = make_worker(P), make_worker(D, behaviour=steps)
    await stack.find(producer, consumer)
    one, other = (stack.pool.workers[each.incarnation] for each in (producer, consumer))
    task = asyncio.create_task(stack.run(make_request(40)))
    await until(lambda: producer.submitted and consumer.submitted)
    assert other.num_streams == 0
    none_streams.set()
    await until(lambda: other.num_streams == 1)
    assert (one.num_legs, one.num_streams, other.num_legs) == (0, 0, 1)
    one_streams.set()
    await task
    assert (other.num_legs, other.num_streams) == (0, 0)
    await stack.close()


async def test_what_waits_is_known_at_once_and_others_by_the_report(make_worker):
    """A report is old: of it counts what this router had not sent when it came."""
    producer, consumer = make_worker(P), make_worker(D)
    stack = Stack()
    await stack.find(producer, consumer)
    worker = stack.pool.workers[producer.incarnation]
    worker.load = LoadReport(
        num_running=0, num_waiting=3, waiting_tokens=500, free_blocks=9, total_blocks=9
    )
    worker.reported = (300, 300)
    worker.leg_tokens = worker.leg_compute_tokens = 100
    (seen,) = [each for each in stack.fleet.snapshot(0.0).workers if each.role is P]
    assert (seen.pending_tokens, seen.compute_tokens) == (300, 300)
    worker.reported = (700, 700)
    (seen,) = [each for each in stack.fleet.snapshot(0.0).workers if each.role is P]
    assert (seen.pending_tokens, seen.compute_tokens) == (100, 100)
    worker.leg_tokens = worker.leg_compute_tokens = 0
    await stack.close()


@pytest.mark.parametrize("loads", [False, True])
async def test_cached_prompts_in_a_workers_queue_are_nobody_elses(make_worker, loads):
    """The worker reports whole prompts, which are this router's own: five turns that are cached but
    for a little wait for a little. What it reports beyond them is others'."""
    producer, consumer = make_worker(P, step=30.0), make_worker(D, step=30.0)
    stack = Stack()
    await stack.find(producer, consumer)
    both = [stack.pool.workers[each.incarnation] for each in (producer, consumer)]
    worker, role = (both[1], D) if loads else (both[0], P)
    placement = Placement(worker.incarnation, None, "")
    attempts = [Attempt(at, placement, asyncio.get_running_loop()) for at in range(5)]
    for attempt in attempts:
        key = RequestKey(b"caller", "theirs", attempt.number)
        request = replace(make_request(1000), key=key)
        hits = {each.incarnation: 960 for each in both}
        assert attempt.start([(each, request) for each in both], hits) is None
    for reported, others in ((5000, 0), (5300, 300)):
        load = replace(NOTHING, waiting_tokens=reported, loading_tokens=reported if loads else 0)
        stack.pool.on_beat(worker.connection, WorkerBeat(Beat(0, 0, False), load, ()))
        (seen,) = [each for each in stack.fleet.snapshot(0.0).workers if each.role is role]
        assert seen.pending_tokens == 200 + others
        assert seen.compute_tokens == (0 if loads else 200 + others)
    for attempt in attempts:
        attempt.end("theirs", finished=False)
    assert worker.leg_whole_tokens == worker.leg_whole_compute_tokens == 0
    await stack.close()


async def test_what_prompts_add_to_decodes_reaches_placement(make_worker):
    """As the worker reports it; nothing is known of one that has not reported."""
    worker = make_worker(D)
    stack = Stack()
    await stack.find(worker)
    known = stack.pool.workers[worker.incarnation]
    known.load = LoadReport(
        num_running=0,
        num_waiting=0,
        waiting_tokens=0,
        free_blocks=9,
        total_blocks=9,
        prompt_steps=((500, 0.0125),),
        mixed_steps=((500, 0.006),),
    )
    (seen,) = stack.fleet.snapshot(0.0).workers
    assert seen.mixed_steps == ((500, 0.006),)
    known.load = None
    (seen,) = stack.fleet.snapshot(0.0).workers
    assert seen.mixed_steps == ()
    await stack.close()


async def test_cached_tokens_wait_for_nobody(make_worker):
    """A turn whose context is cached is no queue of a context."""
    producer = make_worker(D, step=0.3)
    stack = Stack()
    await stack.find(producer)
    worker = stack.pool.workers[producer.incarnation]
    placement = Placement(worker.incarnation, None, "")
    attempt = Attempt(0, placement, asyncio.get_running_loop())
    request = make_request(40)
    assert attempt.start([(worker, request)], {worker.incarnation: 32}) is None
    assert (worker.leg_tokens, worker.leg_compute_tokens, worker.leg_prompts) == (8, 8, 1)
    attempt.end(request.key.request, finished=False)
    assert worker.leg_tokens == worker.leg_prompts == 0
    await stack.close()


async def test_blocks_of_several_groups_count_by_span(make_worker):
    """Two groups of full attention and one window: a span of a long prompt takes two blocks."""
    consumer = make_worker(D)
    stack = Stack()
    await stack.find(consumer)
    worker = stack.pool.workers[consumer.incarnation]
    (group,) = worker.card.fingerprint.layout.groups
    window = replace(group, kind=KVKind.WINDOW, span=32)
    fingerprint = replace(worker.card.fingerprint, layout=KVLayout((group, group, window)))
    worker.card = replace(worker.card, fingerprint=fingerprint)
    worker.__post_init__()
    worker.load = replace(NOTHING, free_blocks=7, total_blocks=100)
    (seen,) = stack.fleet.snapshot(0.0).workers
    assert (seen.total_blocks, seen.free_blocks, seen.free_share) == (50, 3, 0.06)
    assert seen.token_bytes == 2 * group.token_bytes
    await stack.close()
