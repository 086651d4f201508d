"""Each term of what a prompt's way makes others miss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.builders import view

from tandem.protocol.card import WorkerRole
from tandem.protocol.steps import Crowd
from tandem.router.placement.damage import (
    Demand,
    Targets,
    behind,
    first_missed,
    gap_missed,
    joining,
    kept_from_prompts,
    mixed_in,
    own_gaps,
)
from tandem.router.placement.rates import Rates, StandIns
from tandem.router.placement.snapshot import Arrivals

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
TARGETS = Targets(0.3, 0.025)
RATES = Rates(((1, 0.006), (50, 0.012), (100, 0.018)), ((500, 0.0125), (2000, 0.046)))
BOUNDED = {"mixed_chunk_tokens": 350}
"""Prompt tokens that keep a step beside 50 decodes within 21 ms."""
WIDE = {"mixed_chunk_tokens": 1000}


def test_a_bound_is_missed_by_chance():
    """Half at the bound itself; a gap, which is measured, is surer than a first token's wait."""
    assert first_missed(0.3, TARGETS) == pytest.approx(0.5)
    assert first_missed(0.1, TARGETS) < 0.01
    assert first_missed(0.9, TARGETS) > 0.99
    assert gap_missed(0.025, TARGETS) == pytest.approx(0.5)
    assert gap_missed(0.021, TARGETS) < 0.002
    assert gap_missed(0.03, TARGETS) > 0.99
    assert first_missed(0.0, TARGETS) == 0.0


@given(st.floats(1e-6, 1e3), st.floats(0, 10))
def test_longer_is_never_less_likely_to_miss(seconds, more):
    """For both bounds, and always a chance."""
    for missed in (first_missed, gap_missed):
        assert 0 <= missed(seconds, TARGETS) <= missed(seconds + more, TARGETS) <= 1


def test_who_comes_behind_waits_longer():
    """Nobody where nobody comes; those of a busy period, as surely as this one is late."""
    busy = view(1, P, prompts_per_s=10.0, prompt_share=0.5)
    assert behind(view(1, P), 0.25, 0.046, TARGETS) == 0.0
    near = behind(busy, 0.25, 0.046, TARGETS)
    assert near == pytest.approx(10 * 0.046 / (1 - 0.5) * first_missed(0.273, TARGETS))
    assert behind(busy, 0.05, 0.046, TARGETS) < 0.01
    idler = view(1, P, prompts_per_s=10.0)
    assert behind(idler, 0.25, 0.046, TARGETS) == pytest.approx(near / 2)


def test_a_queue_that_is_late_already_is_no_excuse():
    """The busy period of a worker that is asked for all it can do does not end: it is priced as of
    nine tenths of it, and no less for a queue beyond the bound."""
    full = view(1, P, prompts_per_s=24.0, prompt_share=1.1)
    assert behind(full, 3.0, 0.046, TARGETS) == pytest.approx(24 * 0.046 * 10, rel=1e-3)
    assert behind(full, 3.0, 0.046, TARGETS) > behind(full, 0.3, 0.046, TARGETS)


def test_steps_over_the_bound_spoil_every_stream():
    """All streams miss with a long prompt in wide steps; a few steps are allowed to each; within
    the bound they lose time alone."""
    wide = mixed_in(RATES, view(2, D, **WIDE), (10_000, 0), Crowd(50), TARGETS).missed(3.0)
    assert wide == pytest.approx(50, abs=5)
    once = mixed_in(RATES, view(2, D, **WIDE), (1000, 0), Crowd(50), TARGETS).missed(3.0)
    assert 15 < once < 25  # a hundredth of 250 gaps are two and a half
    bounded = mixed_in(RATES, view(2, D, **BOUNDED), (2000, 0), Crowd(50), TARGETS).missed(3.0)
    assert 0.1 < bounded < 0.4


def test_time_lost_counts_by_how_near_the_worker_is_to_its_bound():
    """The same prompt costs an idle worker next to nothing, and more where more decode."""
    costs = [
        mixed_in(
            RATES, view(2, D, mixed_chunk_tokens=100), (2000, 0), Crowd(streams), TARGETS
        ).missed(3.0)
        for streams in (0, 10, 50, 100)
    ]
    assert costs == sorted(costs)
    assert costs[0] < 0.01
    assert costs[-1] > 10 * costs[1]


def test_one_more_stream_slows_the_others():
    """A little, until all of them come over the bound."""
    assert joining(RATES, Crowd(0), 0, TARGETS) < 0.01
    assert 0.05 < joining(RATES, Crowd(50), 0, TARGETS) < 0.3
    assert joining(RATES, Crowd(157), 0, TARGETS) > 5  # 25 ms a step
    assert joining(Rates((), RATES.prompt), Crowd(50), 0, TARGETS) == 0.0


def test_decoding_keeps_a_prefill_worker_from_prompts():
    """By the prompts of the whole fleet, not those that it has; as if it decoded nothing yet, so
    that who joins pays as much as who was first."""
    quiet, busy = Demand(1.0, 0.05), Demand(18.0, 0.85)
    worker = view(1, P, **BOUNDED)
    assert kept_from_prompts(RATES, worker, 0, quiet, 3.0, TARGETS) < 0.01
    assert kept_from_prompts(RATES, worker, 0, busy, 3.0, TARGETS) > 10
    joined = view(1, P, **BOUNDED, chunk_tokens=350, num_decoding=10)
    assert kept_from_prompts(RATES, joined, 0, busy, 3.0, TARGETS) > 10
    over = Demand(25.0, 1.2)
    assert (
        kept_from_prompts(RATES, worker, 0, over, 3.0, TARGETS) > 10
    )  # all are late: fewer are done


def test_demand_is_the_fleets():
    """Prompts that decode workers compute would come to prefill workers."""
    workers = [
        view(1, P, prompts_per_s=10.0, prompt_share=0.5),
        view(2, D, prompts_per_s=4.0, prompt_share=0.3),
    ]
    assert Demand.of(workers) == Demand(14.0, 0.8)
    assert Demand.of([*workers, view(3, P)]) == Demand(7.0, 0.4)
    assert Demand.of(workers[1:]) == Demand()
    assert Demand().at_least(0.05, 2.0) == Demand(0.5, 0.025)


def test_demand_is_what_was_asked_for_where_reports_are_behind():
    """When a load begins, prefill workers still say that they are idle."""
    idle = [view(1, P, prompt_steps=((2048, 0.04),)), view(2, D)]
    asked = Arrivals(24.0, 24 * 2048.0)
    seen = Demand.of(idle, asked)
    assert seen.prompts_per_s == 24.0
    assert seen.share == pytest.approx(0.96)
    assert Demand.of([*idle, view(3, P)], asked).prompts_per_s == 12.0
    busy = [view(1, P, prompt_steps=((2048, 0.04),), prompts_per_s=30.0, prompt_share=1.0)]
    assert Demand.of(busy, asked) == Demand(30.0, 1.0)
    assert Demand.of(idle[1:], asked) == Demand()


def test_who_has_decoded_few_takes_as_much_longer_for_many_as_others():
    """A prefill worker's few small steps do not say that any number decodes in their time."""
    p = view(1, P, prompt_steps=RATES.prompt, decode_steps=((1, 0.005),))
    d = view(2, D, decode_steps=RATES.decode, context_s=1e-7)
    few, many = Crowd(1), Crowd(60, 100_000)
    alone, known = Rates.of(p, StandIns.of((p,))), Rates.of(p, StandIns.of((p, d)))
    assert alone is not None
    assert known is not None
    assert alone.decodes(many) == alone.decodes(few) == 0.005
    assert known.decodes(few) == pytest.approx(0.005)
    assert known.decodes(many) - 0.005 == pytest.approx(
        RATES.decodes(many) - RATES.decodes(few) + 1e-7 * 100_000
    )
    wide = view(1, P, prompt_steps=RATES.prompt, decode_steps=((1, 0.005), (200, 0.006)))
    seen = Rates.of(wide, StandIns.of((wide, d)))
    assert seen is not None
    assert seen.decode == wide.decode_steps


def test_own_gaps_are_those_of_mixed_steps_where_prompts_come():
    """Even steps where no prompt is computed; too long ones where wide chunks come often."""
    wide = view(1, P, **WIDE)
    assert own_gaps(RATES, wide, Crowd(11), 0.0, TARGETS) < 0.01
    assert own_gaps(RATES, wide, Crowd(11), 0.5, TARGETS) > 0.99
    assert own_gaps(RATES, view(1, P, **BOUNDED), Crowd(11), 0.5, TARGETS) < 0.01
    assert own_gaps(RATES, view(1, P, **BOUNDED), Crowd(201), 0.0, TARGETS) > 0.99


LONG = Rates(RATES.decode, RATES.prompt, context_s=5e-8, steepness=4e-5)
"""With what contexts of decodes take, and those of prompts."""


def test_a_long_context_slows_those_beside_it():
    """Joining with 20,000 tokens adds a millisecond to every step of the others, of 12."""
    crowd = Crowd(50, 50 * 1_000)
    short, long = (joining(LONG, crowd, context, TARGETS) for context in (100, 20_000))
    assert long > 5 * short
    assert own_gaps(LONG, view(2, D, **BOUNDED), Crowd(50, 400_000), 0.0, TARGETS) > 0.99
    assert own_gaps(LONG, view(2, D, **BOUNDED), Crowd(50, 100_000), 0.0, TARGETS) < 0.01


def test_a_prompt_behind_a_long_context_takes_longer():
    """By what it looks back at; a worker that bounds its steps makes more of them instead."""
    alone = Crowd(0)
    assert LONG.compute(500, 1000, alone, 20_000) == pytest.approx(
        1.8 * LONG.compute(500, 1000, alone), rel=0.06
    )
    wide = mixed_in(LONG, view(2, D, **WIDE), (800, 20_000), Crowd(50), TARGETS).missed(3.0)
    bounds = view(2, D, **BOUNDED, bounds_steps=True)
    assert wide > 15 * mixed_in(LONG, bounds, (800, 20_000), Crowd(50), TARGETS).missed(3.0)


def test_contexts_of_who_joined_since_the_report_are_like_the_others():
    """The report is a second old; streams are known at once."""
    worker = view(2, D, num_decoding=4, context_tokens=8_000, num_streams=6)
    assert worker.crowd == Crowd(6, 12_000)
    assert view(2, D, num_streams=6).crowd == Crowd(6, 0)
