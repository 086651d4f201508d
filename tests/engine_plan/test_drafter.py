"""Drafts by prompt lookup: proposed tokens, and sequences that make none for a while."""

import json
from itertools import pairwise

import numpy as np
import pytest
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.plans import next_plan
from tests.engine_plan.test_drafts import planned

from tandem.engine.config.scheduler import SchedulerConfig
from tandem.engine.config.speculative import NgramLookup, lookup_of
from tandem.engine.scheduler.drafter import PAUSE, NgramDrafter, continuation
from tandem.protocol.errors import InvalidParameter

GIVEN = {"method": "ngram", "num_speculative_tokens": 3}


def proposed(tokens, tokens_each=3, most=3, least=2):
    lookup = NgramLookup(tokens_each, most, least)
    return continuation(np.array(tokens, dtype=np.int32), lookup, tokens_each).tolist()


def test_the_tokens_after_the_same_n_gram_are_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5]
    # The longest n-gram goes first, though a shorter one is nearer.
    assert proposed([7, 1, 2, 3, 9, 9, 1, 2, 4, 4, 4, 7, 1, 2]) == [3, 9, 9]
    # Of equal ones the last that enough tokens follow.
    assert proposed([1, 2, 3, 3, 3, 1, 2, 4, 4, 4, 1, 2]) == [4, 4, 4]
    assert proposed([5, 5, 5, 5]) == [5]
    assert proposed([1, 2, 3, 4, 2]) == []
    assert proposed([1, 2, 3, 4, 2], least=1) == [3, 4, 2]
    assert proposed([1]) == []


def test_a_lookup_is_read_in_vllms_spelling():
    assert lookup_of(json.dumps(GIVEN)) == NgramLookup(3, 5, 5)
    assert lookup_of({**GIVEN, "prompt_lookup_max": 4}) == NgramLookup(3, 4, 4)
    assert lookup_of({**GIVEN, "prompt_lookup_min": 2}) == NgramLookup(3, 2, 2)
    whole = {**GIVEN, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert SchedulerConfig(speculative_config=json.dumps(whole)).lookup == NgramLookup(3, 4, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "JSON object"),
        ("[]", "JSON object"),
        ({**GIVEN, "model": "x"}, "num_speculative_tokens, prompt_lookup_max"),
        ({**GIVEN, "method": "eagle"}, "ngram"),
        ({"num_speculative_tokens": 3}, "ngram"),
        ({"method": "ngram"}, "1 to 15"),
        ({**GIVEN, "num_speculative_tokens": 16}, "1 to 15"),
        ({**GIVEN, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "1 to 2"),
    ],
)
def test_a_bad_lookup_is_refused_with_what_is_allowed(given, words):
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(InvalidParameter, match=words):
        SchedulerConfig(speculative_config=text)


@pytest.mark.parametrize("num_blocks", [64, 12])
@pytest.mark.parametrize("ahead", [False, True])
def test_lookup_changes_no_token(ahead, num_blocks):
    """Most drafts are wrong, and some sequences are preempted."""
    text = json.dumps({**GIVEN, "prompt_lookup_min": 1, "prompt_lookup_max": 3})
    harness = Harness(num_blocks, async_scheduling=ahead, speculative_config=text)
    requests = [
        request_of(f"r{i}", 11 + 7 * i, params=params_of(max_tokens=40 + i, ignore_eos=True))
        for i in range(4)
    ]
    for request in requests:
        assert harness.add(request) is None
    harness.run()
    for request in requests:
        harness.check(request)


def test_drafts_follow_a_token_in_flight():
    """The first token of a lookup stands for it, and the row is in the next step."""
    harness = Harness(async_scheduling=True)
    harness.add(request_of("a", params=params_of(max_tokens=90, ignore_eos=True)))
    next_plan(harness)
    scheduler = harness.core.scheduler
    (request,) = scheduler.request_table.running
    in_flight = planned(harness)
    last = request.token_ids[-1]
    request.token_ids[:6] = [last, 1, 2, 3, 4, 5]
    lookup = NgramLookup(3, 1, 1)
    drafter = NgramDrafter(lookup, scheduler.request_table.drafts)
    drafter.propose(scheduler.request_table.running)
    plan = planned(harness)
    (row,), (drafts,) = plan.rows, plan.drafts
    assert row.num_computed == in_flight.rows[0].num_computed + 1
    assert drafts.draft_token_ids == (2, 3, 4)


def test_no_step_is_planned_before_the_result_of_drafts_of_all_sequences():
    text = json.dumps({**GIVEN, "prompt_lookup_max": 1})
    harness = Harness(async_scheduling=True, speculative_config=text)
    harness.add(request_of("a", params=params_of(max_tokens=90, ignore_eos=True)))
    next_plan(harness)
    scheduler = harness.core.scheduler
    (request,) = scheduler.request_table.running
    request.token_ids[:5] = [request.token_ids[-1], 1, 2, 3, 4]
    plan = planned(harness)
    assert len(plan.drafts) == 1
    assert scheduler.schedule() is None
    scheduler.update_from_output(harness.executor.execute(plan).result())
    assert scheduler.schedule() is not None


def test_drafts_that_are_never_accepted_pause():
    harness = Harness()
    harness.add(request_of("a", params=params_of(max_tokens=900, ignore_eos=True)))
    next_plan(harness)
    table = harness.core.scheduler.request_table
    (request,) = table.running
    drafter = NgramDrafter(NgramLookup(2, 1, 1), table.drafts)
    proposals = []
    for _ in range(6 + 8 * PAUSE):
        request.token_ids.append(7)
        request.num_computed = len(request.token_ids) - 1
        drafter.propose(table.running)
        if table.drafts:
            table.drafts.drop(request)
            proposals.append(len(request.token_ids))
    gaps = [later - earlier for earlier, later in pairwise(proposals)]
    tries = gaps.index(PAUSE)
    assert gaps[:tries] == [1] * tries
    assert tries < 5
    assert gaps[tries:] == [PAUSE, 2 * PAUSE, 4 * PAUSE]
