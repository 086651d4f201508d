"""Rows that verify drafts: no token changes, and the next step is planned before their result."""

from __future__ import annotations

import json

import pytest
from msgspec import structs
from tests.engine_plan.builders import Harness, facts_of_layers, params_of, request_of
from tests.engine_plan.plans import next_plan

from tandem.engine.step import SpecTokens


def drafting(most=3, wrong_every=4, num_blocks=64, **fields):
    """A harness whose ranks propose ``most`` tokens, one of ``wrong_every`` of them wrong."""
    text = json.dumps({"method": "ngram", "num_speculative_tokens": most})
    harness = Harness(num_blocks, speculative_config=text, **fields)
    harness.executor.guess = (most, wrong_every)
    return harness


def planned(harness):
    plan = harness.core.scheduler.schedule()
    assert plan is not None
    return plan


def applied(harness, plan):
    harness.core.scheduler.update_from_output(harness.executor.execute(plan).result())


def scores_of(harness, name):
    """Log-probabilities of a request's tokens, in order."""
    return [
        each
        for output in harness.outputs
        if output.request == name
        for each in output.logprobs or ()
    ]


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "logprobs": 2},
        {"min_tokens": 9, "stop_token_ids": (3, 9, 11, 20, 40)},
    ],
)
def test_drafts_change_no_token(fields, ahead, wrong_every):
    plain = Harness(async_scheduling=ahead)
    drafted = drafting(wrong_every=wrong_every, async_scheduling=ahead)
    requests = [
        request_of(f"r{i}", 11 + 7 * i, params=params_of(max_tokens=20 + i, **fields))
        for i in range(4)
    ]
    for harness in (plain, drafted):
        for request in requests:
            assert harness.add(request) is None
        harness.run()
    for request in requests:
        drafted.check(request)
        name = request.key.request
        assert scores_of(drafted, name) == scores_of(plain, name)
    assert drafted.executor.num_checked > 4
    drafted.check_empty()


@pytest.mark.parametrize("ahead", [False, True])
def test_right_drafts_save_steps(ahead):
    """Three of four tokens are drafts, and every step has the row."""
    harness = drafting(wrong_every=100, async_scheduling=ahead)
    request = request_of("a", params=params_of(max_tokens=41, ignore_eos=True))
    harness.add(request)
    harness.run()
    harness.check(request)
    frames = [len(each.token_ids) for each in harness.outputs]
    assert frames[: 2 + ahead] == [1] * (1 + ahead) + [4]
    assert harness.core.stats()["steps"] <= 12 + 2 * ahead


def test_rows_with_drafts_are_in_every_step():
    """The second plan counts as if the first one's drafts were accepted; of these one is not."""
    harness = drafting(wrong_every=3)
    for name in "ab":
        harness.add(request_of(name, params=params_of(max_tokens=30, ignore_eos=True)))
    next_plan(harness)
    one, two = planned(harness), planned(harness)
    for plan in (one, two):
        assert [row.num_scheduled_tokens for row in plan.rows] == [4, 4]
        assert plan.drafts == tuple(SpecTokens(row.seq, 3) for row in plan.rows)
    starts = [[row.num_computed for row in plan.rows] for plan in (one, two)]
    assert starts[1] == [start + 4 for start in starts[0]]
    applied(harness, one)
    running = harness.core.scheduler.request_table.running
    assert [each.num_pending_drafts for each in running] == [3, 3]
    applied(harness, two)
    for request in running:
        assert request.num_uncomputed == 1
        assert (request.num_pending_drafts, request.num_output_placeholders) == (0, 0)
    harness.run()


def test_drafts_end_at_the_length_of_a_request():
    """A row that may reach it in a step in flight is not in the next one."""
    harness = drafting(most=6, wrong_every=100)
    request = request_of("a", params=params_of(max_tokens=9, ignore_eos=True))
    harness.add(request)
    next_plan(harness)
    (row,) = (one := planned(harness)).rows
    assert row.num_scheduled_tokens == 7
    (row,) = (two := planned(harness)).rows
    assert row.num_scheduled_tokens == 1
    assert harness.core.scheduler.schedule() is None
    for plan in (one, two):
        applied(harness, plan)
    harness.run()
    harness.check(request)


def test_a_stop_among_accepted_tokens_ends_there():
    """Tokens sampled after it are dropped, and nothing is held."""
    harness = drafting(most=7, wrong_every=100)
    free = request_of("a", params=params_of(max_tokens=20, ignore_eos=True))
    tokens = harness.oracle(free)[0]
    stop = next(token for at, token in enumerate(tokens) if at >= 3 and token not in tokens[:at])
    params = params_of(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    harness.add(request_of("a", params=params))
    harness.run()
    assert harness.tokens("a") == tokens[: tokens.index(stop) + 1]
    assert harness.finish("a") == "stop"
    harness.check_empty()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [5, 6, 8])
def test_drafts_under_preemption(num_blocks, ahead):
    """Drafts take no other sequence's blocks; a sequence preempted with drafts goes on rightly."""
    harness = drafting(most=5, num_blocks=num_blocks, async_scheduling=ahead)
    requests = [
        request_of(f"r{i}", 10, params=params_of(max_tokens=60, ignore_eos=True, temperature=1.0))
        for i in range(3)
    ]
    for request in requests:
        harness.add(request)
    harness.run()
    for request in requests:
        harness.check(request)
    harness.check_empty()


def test_a_window_keeps_what_rejected_drafts_would_have_left():
    """Two steps with 15 drafts each are in flight, and a chunk has at most 17 tokens."""
    harness = drafting(most=15, facts=facts_of_layers("window", 31), max_num_batched_tokens=17)
    harness.add(request_of("a", 109, params=params_of(max_tokens=200, ignore_eos=True)))
    scheduler = harness.core.scheduler
    while not (scheduler.request_table.running and scheduler.request_table.running[0].num_output):
        next_plan(harness)
    (request,) = scheduler.request_table.running
    assert request.num_computed == 109
    request.num_computed, request.num_pending_drafts = 139, 30
    assert scheduler.manager.grow(request, 140)
    assert request.window_starts == [(109 - 30) // 16]
    assert request.capacity >= 140


def test_drafts_of_one_step_are_bounded_by_its_tokens():
    harness = drafting(most=15, num_blocks=256, max_num_batched_tokens=20)
    for name in "ab":
        harness.add(request_of(name, 8, params=params_of(max_tokens=90, ignore_eos=True)))
    next_plan(harness)
    plan = next_plan(harness)
    assert sorted(row.num_scheduled_tokens for row in plan.rows) == [3, 16]


def test_rows_with_logits_processors_have_no_drafts():
    harness = drafting(wrong_every=100)
    for name in "ab":
        harness.add(request_of(name, params=params_of(max_tokens=9, ignore_eos=True)))
    next_plan(harness)
    group = harness.core.scheduler.request_table.running[0].group
    params = structs.replace(group.source.params, extra_args={"x": 1})
    group.source = structs.replace(group.source, params=params)
    assert [row.num_scheduled_tokens for row in planned(harness).rows] == [1, 4]
