"""The setting of drafts, and sequences that have none for a while."""

import json
from copy import copy

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.plans import next_plan

from tandem.engine.config.scheduler import SchedulerConfig
from tandem.engine.config.speculative import NgramLookup, lookup_of
from tandem.engine.scheduler.drafter import PAUSE, Drafter
from tandem.engine.step import SeqId
from tandem.protocol.errors import InvalidParameter

GIVEN = {"method": "ngram", "num_speculative_tokens": 3}


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


@pytest.fixture
def request_with_drafts():
    harness = Harness()
    harness.add(request_of("a", params=params_of(max_tokens=900, ignore_eos=True)))
    next_plan(harness)
    (request,) = harness.core.scheduler.request_table.running
    request.num_proposed = 2
    return request


def test_drafts_that_are_never_accepted_pause(request_with_drafts):
    """Pauses end at multiples of their length, at which other sequences try again, too."""
    drafter, tries = Drafter(2), []
    for step in range(1, 10 * PAUSE):
        drafter.begin_step(1)
        if drafter.is_due(request_with_drafts):
            tries.append(step)
            drafter.note(request_with_drafts, 0)
    first = [step for step in tries if step < PAUSE]
    assert first == list(range(1, len(first) + 1))
    assert len(first) < 6
    assert tries[len(first) :] == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE]


def test_results_of_drafts_in_flight_do_not_lengthen_a_pause(request_with_drafts):
    drafter = Drafter(2)
    drafter.begin_step(1)
    while drafter.is_due(request_with_drafts):
        drafter.note(request_with_drafts, 0)
    for _ in range(PAUSE - 1):
        drafter.note(request_with_drafts, 0)
        drafter.begin_step(1)
    assert drafter.is_due(request_with_drafts)


def test_first_drafts_of_other_sequences_pause_after_some_that_failed(request_with_drafts):
    drafter, other = Drafter(2), copy(request_with_drafts)
    drafter.begin_step(1)
    for seq in range(100, 100 + PAUSE):
        other.seq = SeqId(seq)
        if drafter.is_due(other):
            drafter.note(other, 0)
    assert not drafter.is_due(request_with_drafts)
    for _ in range(PAUSE):
        drafter.begin_step(1)
    assert drafter.is_due(request_with_drafts)
