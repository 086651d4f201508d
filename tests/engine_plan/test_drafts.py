"""Rows of several tokens: drafts that are checked, and emitted tokens that are drawn again."""

from __future__ import annotations

import pytest
from tests.engine_plan.builders import VOCAB, Harness, params_of, request_of
from tests.engine_plan.drafting import Drafter, guesses
from tests.engine_plan.plans import next_plan

from tandem.engine.step import SeqId, SpecTokens


def run_drafted(harness, outputs, *, most=3, wrong_every=4, limit=500):
    """Steps with drafts until nothing is left; how many proposals were taken."""
    guess = guesses(outputs, most=most, wrong_every=wrong_every, vocab=VOCAB)
    drafter = Drafter(harness.core)
    for _ in range(limit):
        if not harness.core.has_work:
            return drafter.taken
        drafter.propose(guess)
        assert harness.step().progressed or not harness.core.has_work, "nothing moves"
    raise AssertionError("not done")


def planned(harness):
    plan = harness.core.scheduler.schedule()
    assert plan is not None
    return plan


def whole(harness, request):
    return harness.oracle(request)[0]


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
    """Right ones, wrong ones, among other rows: tokens, scores and ends are those without."""
    plain, drafted = (Harness(async_scheduling=ahead) for _ in range(2))
    requests = [
        request_of(f"r{i}", 11 + 7 * i, params=params_of(max_tokens=20 + i, **fields))
        for i in range(4)
    ]
    for harness in (plain, drafted):
        for request in requests:
            assert harness.add(request) is None
    plain.run()
    outputs = {each.key.request: whole(plain, each) for each in requests}
    taken = run_drafted(drafted, outputs, wrong_every=wrong_every)

    assert taken > 4
    for request in requests:
        drafted.check(request)
        name = request.key.request
        assert scores_of(drafted, name) == scores_of(plain, name)
    drafted.check_empty()


def scores_of(harness, name):
    """Log-probabilities of a request's tokens, in order."""
    return [
        each
        for output in harness.outputs
        if output.request == name
        for each in output.logprobs or ()
    ]


def test_right_drafts_save_steps_and_come_in_one_frame():
    """Four tokens a step where three drafts are right."""
    harness = Harness()
    request = request_of("a", params=params_of(max_tokens=17, ignore_eos=True))
    harness.add(request)
    outputs = {"a": whole(harness, request)}
    run_drafted(harness, outputs, wrong_every=100)
    harness.check(request)
    frames = [len(each.token_ids) for each in harness.outputs]
    assert frames[0] == 1
    assert set(frames[1:]) == {4}
    assert harness.core.stats()["steps"] == 5


def test_a_row_with_drafts_is_in_no_step_until_it_is_settled():
    """Others go on; its row stands behind the decodes."""
    harness = Harness()
    scheduler = harness.core.scheduler
    for name in "ab":
        harness.add(request_of(name, params=params_of(max_tokens=30, ignore_eos=True)))
    next_plan(harness)
    first, second = scheduler.request_table.running
    assert scheduler.request_table.drafts.propose(first, (1, 2))
    plan = planned(harness)
    assert [(row.seq, row.num_scheduled_tokens) for row in plan.rows] == [
        (second.seq, 1),
        (first.seq, 3),
    ]
    assert plan.drafts == (SpecTokens(first.seq, (1, 2)),)
    ahead = planned(harness)
    assert [row.seq for row in ahead.rows] == [second.seq]
    assert ahead.drafts == ()
    for each in (plan, ahead):
        scheduler.update_from_output(harness.executor.execute(each).result())
    assert {row.seq for row in planned(harness).rows} == {first.seq, second.seq}


def test_proposals_that_cannot_be_are_not_taken():
    """Before the first token, with a token on its way, at the end, twice, or none at all."""
    harness = Harness()
    drafts = harness.core.scheduler.request_table.drafts
    harness.add(request_of("a", params=params_of(max_tokens=3, ignore_eos=True)))
    scheduler = harness.core.scheduler
    plan = planned(harness)
    (request,) = scheduler.request_table.running
    assert not drafts.propose(request, (1,))
    scheduler.update_from_output(harness.executor.execute(plan).result())
    assert not drafts.propose(request, ())
    assert drafts.propose(request, (1, 2, 3))
    assert not drafts.propose(request, (1,))
    plan = planned(harness)
    assert plan.drafts == (SpecTokens(request.seq, (1,)),), "one of three tokens left is the draw's"
    scheduler.update_from_output(harness.executor.execute(plan).result())
    assert not drafts.propose(request, (1,)) or request.num_output == 2


def test_a_stop_among_accepted_tokens_ends_there():
    """What was drawn behind it is dropped, and nothing is held."""
    harness = Harness()
    free = request_of("a", params=params_of(max_tokens=20, ignore_eos=True))
    tokens = whole(harness, free)
    stop = next(token for at, token in enumerate(tokens) if at >= 3 and token not in tokens[:at])
    at = tokens.index(stop)
    request = request_of(
        "a", params=params_of(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    )
    harness.add(request)
    run_drafted(harness, {"a": tokens}, most=7, wrong_every=100)
    assert harness.tokens("a") == tokens[: at + 1]
    assert harness.finish("a") == "stop"
    harness.check_empty()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [5, 6, 8])
def test_drafts_under_preemption(num_blocks, ahead):
    """Few blocks: drafts take nobody's, and who is preempted with drafts goes on rightly."""
    harness = Harness(num_blocks, async_scheduling=ahead)
    requests = [
        request_of(f"r{i}", 10, params=params_of(max_tokens=60, ignore_eos=True, temperature=1.0))
        for i in range(3)
    ]
    for request in requests:
        harness.add(request)
    outputs = {each.key.request: whole(harness, each) for each in requests}
    run_drafted(harness, outputs, most=5)
    for request in requests:
        harness.check(request)
    harness.check_empty()


def test_a_proposal_of_one_that_is_aborted_is_forgotten():
    harness = Harness()
    request = request_of("a", params=params_of(ignore_eos=True))
    harness.add(request)
    next_plan(harness)
    scheduler = harness.core.scheduler
    assert scheduler.request_table.drafts.propose(scheduler.request_table.running[0], (1, 2))
    scheduler.abort(request.key)
    assert not scheduler.request_table.drafts
    assert scheduler.schedule() is None
    harness.core.check_integrity()


def test_drafts_of_one_step_are_bounded():
    """By the step's tokens, of which one is left to others, and by the rows of logits."""
    harness = Harness(256, max_num_batched_tokens=64)
    for name in "ab":
        params = params_of(max_tokens=900, ignore_eos=True)
        harness.add(request_of(name, 8, params=params))
    next_plan(harness)
    first, second = harness.core.scheduler.request_table.running
    drafts = harness.core.scheduler.request_table.drafts
    assert drafts.propose(first, [1] * 100)
    assert drafts.propose(second, [1] * 100)
    plan = next_plan(harness)
    assert [(row.seq, row.num_scheduled_tokens) for row in plan.rows] == [
        (second.seq, 1),
        (first.seq, 63),
    ]


def test_kept_tokens_are_the_prefix_that_was_drawn_and_one_more():
    """Forced ones stand: only the last draw counts."""
    drafted = SpecTokens(SeqId(0), (5, 6, 7))
    assert drafted.kept([5, 6, 7, 8]) == (5, 6, 7, 8)
    assert drafted.kept([5, 9, 7, 8]) == (5, 9)
    assert drafted.kept([4, 6, 7, 8]) == (4,)
    assert SpecTokens(SeqId(0), (5, 6, 7), forced=True).kept([4, 6, 7, 8]) == (8,)


def test_who_loses_its_blocks_while_drafts_are_planned_is_in_no_row():
    """The step goes on without them, and the sequence is computed again."""
    harness = Harness(2)
    requests = [
        request_of(name, prompt, params=params_of(max_tokens=6, ignore_eos=True))
        for name, prompt in (("a", 16), ("b", 8))
    ]
    for request in requests:
        harness.add(request)
    next_plan(harness)
    first, second = harness.core.scheduler.request_table.running
    drafts = harness.core.scheduler.request_table.drafts
    assert drafts.propose(second, (1, 2))
    plan = next_plan(harness)
    assert [row.seq for row in plan.rows] == [first.seq]
    assert plan.drafts == ()
    assert not drafts
    harness.run()
    for request in requests:
        harness.check(request)
