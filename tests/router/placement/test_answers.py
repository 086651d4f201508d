"""Seconds of answers as placement counts them, and what it takes workers for that are untaught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.router.builders import inc, view

from tandem.protocol.card import WorkerRole
from tandem.protocol.steps import Crowd
from tandem.router.placement.answers import expected_tokens, lengthened, token_seconds
from tandem.router.placement.damage import Targets
from tandem.router.placement.elastic import ElasticPolicy
from tandem.router.placement.forecast import ANSWER
from tandem.router.placement.rates import Rates, StandIns, as_taught
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, LinkPace, PromptFacts

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
PAIR = (inc(1), inc(2))
TARGETS = Targets(0.3, 0.025)
DECODES, PROMPTS = ((1, 0.006), (50, 0.012), (100, 0.018)), ((500, 0.0125), (2000, 0.046))
BESIDE = ((240, 0.002), (500, 0.006), (760, 0.0115))
RATES = Rates(DECODES, PROMPTS, BESIDE, context_s=4.5e-8)
MEASURED = {
    "decode_steps": DECODES,
    "prompt_steps": PROMPTS,
    "beside_steps": BESIDE,
    "context_s": 4.5e-8,
    "bounds_steps": True,
    "mixed_chunk_tokens": 700,
    "chunk_tokens": 700,
    "total_blocks": 20_000,
    "free_blocks": 20_000,
    "residence_s": 3.0,
    "max_model_len": 40_000,
    "max_num_seqs": 256,
}


def forecasts(prompt, producer, consumer):
    """Each way's forecast by its name, of one worker of each role."""
    workers = (view(1, P, **{**MEASURED, **producer}), view(2, D, **{**MEASURED, **consumer}))
    fleet = FleetSnapshot(workers, frozenset([PAIR]), {PAIR: LinkPace(100e9, 0, 0.03)})
    found = ElasticPolicy(0, 0.1, TARGETS).forecasts(prompt, fleet, Exclusions())
    return {each.way: each for each in found}


def test_a_token_takes_longer_where_prompts_take_of_the_time():
    """Twice as long where they take half of it, ten times at most."""
    assert token_seconds(RATES, Crowd(50), 0.0) == pytest.approx(0.012)
    assert token_seconds(RATES, Crowd(50), 0.5) == pytest.approx(0.024)
    assert token_seconds(RATES, Crowd(50), 1.0) == pytest.approx(0.12)
    assert token_seconds(Rates((), PROMPTS), Crowd(50), 0.0) == 0.0


def test_an_answer_is_as_long_as_others_and_as_was_asked_for():
    """By where requests stay longest; the least of it and of what the prompt may have."""
    workers = [view(1, P, residence_s=0.1), view(2, D, residence_s=3.0, num_decoding=50)]
    rates = {inc(1): RATES, inc(2): RATES}
    asked = PromptFacts(num_tokens=100, max_new_tokens=32)
    free = replace(asked, max_new_tokens=None)
    assert expected_tokens(free, workers, rates) == pytest.approx(3.0 / 0.012)
    assert expected_tokens(asked, workers, rates) == 32
    unknown = [view(1, P), view(2, D)]
    assert expected_tokens(free, unknown, rates) == 0.0
    assert expected_tokens(free, workers, {inc(1): RATES, inc(2): None}) == 0.0
    assert expected_tokens(free, [], {}) == 0.0


def test_who_joins_lengthens_the_answers_of_others():
    """By its row and its context, for each stream there; nobody's where nobody decodes."""
    assert lengthened(RATES, Crowd(0), 8000, 300, 0.0) == 0.0
    short = lengthened(RATES, Crowd(10, 80_000), 0, 300, 0.0)
    long = lengthened(RATES, Crowd(10, 80_000), 8000, 300, 0.0)
    assert long - short == pytest.approx(10 * 300 * 8000 * 4.5e-8)
    assert lengthened(RATES, Crowd(20, 80_000), 8000, 300, 0.0) == pytest.approx(2 * long)
    assert lengthened(RATES, Crowd(10, 80_000), 8000, 300, 0.5) == pytest.approx(2 * long)


def test_an_agents_turn_stays_where_its_answer_is_short():
    """Ten streams of long contexts decode on D, and P is quiet: nothing misses its bounds by either
    way, but a hand-off makes all answers longer. To an answer of 4 tokens it does little."""
    busy = {"num_running": 10, "num_decoding": 10, "context_tokens": 80_000}
    quiet = {"residence_s": 0.1, "prompt_share": 0.02, "prompts_per_s": 0.5}
    hits = {inc(1): 7_936, inc(2): 7_936}
    turn = PromptFacts(num_tokens=8_500, hits=hits, max_new_tokens=600)
    found = forecasts(turn, quiet, busy)
    assert found["prefill"].cost + 0.1 < found["pair"].cost
    assert found["prefill"].answers + 2.0 < found["pair"].answers
    apart = found["pair"].cost - found["prefill"].cost
    without = apart - ANSWER * (found["pair"].answers - found["prefill"].answers)
    assert without < 2 / 3 * apart, "without them it would be within patience, or nearly"
    brief = forecasts(replace(turn, max_new_tokens=4), quiet, busy)
    assert brief["pair"].answers < brief["prefill"].answers + 0.1
    assert "answers" in str(found["pair"])


def test_a_prompt_lengthens_the_answers_that_it_is_computed_beside():
    """On a decode worker by what its chunks add, for each that decodes there."""
    prompt = PromptFacts(num_tokens=2_000, max_new_tokens=100)
    alone = forecasts(prompt, {}, {})
    beside = forecasts(prompt, {"num_decoding": 5}, {"num_decoding": 5})
    for way in ("pair", "decode", "prefill"):
        assert beside[way].answers - alone[way].answers > 5 * 0.01


def test_mixed_steps_are_forecast_by_what_prompts_add():
    """Not by what they take alone, where a step of both was made here or elsewhere."""
    assert RATES.step(Crowd(50), 500) == pytest.approx(0.012 + 0.006)
    assert RATES.step(Crowd(0), 500) == pytest.approx(0.0125)
    assert Rates(DECODES, PROMPTS).step(Crowd(50), 500) == pytest.approx(0.012 + 0.0125)
    assert RATES.added(1_000, 500) == pytest.approx(2 * 0.006)
    untaught = view(1, P, **{**MEASURED, "beside_steps": ()})
    known = Rates.of(untaught, StandIns.of((view(2, D, **MEASURED),)))
    assert known is not None
    assert known.beside == BESIDE


def test_who_has_made_no_step_of_both_is_taken_to_fill_it():
    """It reports the least chunk until it was sent a prompt, for which nobody would send one."""
    fresh = {**MEASURED, "prompt_steps": (), "beside_steps": ()}
    fresh |= {"mixed_chunk_tokens": 64, "chunk_tokens": 64, "num_decoding": 50}
    worker = view(2, D, **fresh)
    known = Rates(DECODES, PROMPTS)
    taught = as_taught(worker, known, TARGETS.itl)
    assert taught.mixed_chunk_tokens == taught.chunk_tokens > 300
    assert known.step(Crowd(50), taught.mixed_chunk_tokens) <= 0.8 * TARGETS.itl
    assert as_taught(view(2, D, **MEASURED), known, TARGETS.itl).mixed_chunk_tokens == 700
    unbounded = view(2, D, **{**fresh, "bounds_steps": False})
    assert as_taught(unbounded, known, TARGETS.itl) is unbounded
    idle = as_taught(view(1, P, **{**fresh, "num_decoding": 0, "chunk_tokens": 2048}), known, 0.025)
    assert idle.chunk_tokens == 2048, "of a step without decodes it has said what it takes"
    behind = {"waiting_tokens": 20_000, "beside_steps": ()}
    found = forecasts(PromptFacts(num_tokens=2_000, max_new_tokens=100), behind, fresh)
    assert found["decode"].ttft < 0.2
    assert found["decode"].cost < found["pair"].cost
