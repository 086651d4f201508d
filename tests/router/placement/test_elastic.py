"""Elastic placement: which way is taken in which situation, by measured rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.builders import inc, view

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import Refusal, RefusalCode
from tandem.router.dispatch.failure import AttemptFailure
from tandem.router.dispatch.ladder import Ladder
from tandem.router.placement.damage import Targets
from tandem.router.placement.elastic import ElasticPolicy
from tandem.router.placement.room import wait_for_room
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, LinkPace, PromptFacts

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
PAIR = (inc(1), inc(2))
MEASURED = {
    "prompt_steps": ((64, 0.0045), (512, 0.0113), (2048, 0.0445)),
    "decode_steps": ((1, 0.00407), (32, 0.00533), (64, 0.00688), (128, 0.0102), (256, 0.017)),
    "total_blocks": 20_000,
    "free_blocks": 20_000,
    "residence_s": 2.0,
    "max_model_len": 40_000,
    "max_num_seqs": 256,
}
BUSY_D = {"num_running": 50, "num_decoding": 50, "chunk_tokens": 700}
FULL_D = {**BUSY_D, "num_running": 200, "num_decoding": 200, "free_blocks": 10, "free_share": 0.0}
CHUNKS = {"mixed_chunk_tokens": 512}
QUIET_P = {**CHUNKS, "prompt_share": 0.02, "prompts_per_s": 0.5}
BUSY_P = {**CHUNKS, "prompt_share": 0.8, "prompts_per_s": 18.0}
"""Prefill workers that could decode within the bound, and whether others' prompts would wait."""
NONE = Exclusions()


def fleet_of(producer=None, consumer=None, pace=None):
    """One worker of each role with the times of a large GPU, linked."""
    prefill = view(1, P, **{**MEASURED, "chunk_tokens": 2048, **(producer or {})})
    decode = view(2, D, **{**MEASURED, "chunk_tokens": 8192, **(consumer or {})})
    pace = pace or LinkPace(12e9, 0, 0.031)
    return FleetSnapshot((prefill, decode), frozenset([PAIR]), {PAIR: pace})


def policy(patience=0.05):
    """With the defaults of a router."""
    return ElasticPolicy(0, patience, Targets(0.3, 0.025))


def way_of(prompt, fleet, exclusions=NONE, patience=0.05):
    """The way that is taken."""
    placement = policy(patience).place(prompt, fleet, 0.0, exclusions)
    assert placement is not None
    assert placement.forecast is not None
    return placement.forecast.way


def prompt_of(tokens, **fields):
    """A prompt with some 256 tokens to come."""
    return PromptFacts(num_tokens=tokens, max_new_tokens=256, **fields)


@pytest.mark.parametrize(
    ("tokens", "hits", "producer", "consumer", "pace", "way"),
    [
        (2048, 0, {}, {}, None, "pair"),
        (2048, 0, {}, BUSY_D, None, "pair"),
        (30_000, 0, {}, BUSY_D, None, "pair"),
        (64, 0, {}, {}, None, "pair"),
        (2048, 2040, {}, BUSY_D, None, "decode"),
        (2048, 0, {"waiting_tokens": 20_000}, BUSY_D, None, "decode"),
        (2048, 0, {"leg_tokens": 20_000}, BUSY_D, None, "decode"),
        (2048, 0, {}, BUSY_D, LinkPace(1e9, 2_000_000_000, 0.031), "decode"),
        (2048, 0, QUIET_P, FULL_D, None, "prefill"),
        (2048, 0, BUSY_P, FULL_D, None, "pair"),
        (2048, 0, {"residence_s": 0.1}, {**FULL_D, "residence_s": 0.1}, None, "pair"),
    ],
)
def test_situations(tokens, hits, producer, consumer, pace, way):
    """P idle or behind, D empty, busy or full, a link that is behind, prompts of any length."""
    prompt = prompt_of(tokens, hits={inc(2): hits})
    assert way_of(prompt, fleet_of(producer, consumer, pace)) == way


def test_a_length_alone_decides_nothing():
    """The same prompt goes either way, by what waits and what runs."""
    prompt = prompt_of(300)
    assert way_of(prompt, fleet_of(consumer=BUSY_D)) == "pair"
    assert way_of(prompt, fleet_of({"waiting_tokens": 20_000}, BUSY_D)) == "decode"


def test_a_queue_takes_what_its_prompts_do():
    """Each begins anew: eight of 2,048 tokens are not one of 16,384 that looks back at itself."""
    times = {"steepness": 4.2e-5, "chunk_tokens": 2048}

    def first_token(tokens, **queue):
        fleet = fleet_of({**times, **queue})
        placement = policy(math.inf).place(prompt_of(tokens), fleet, 0.0, NONE)
        return placement.forecast.ttft

    alone = first_token(2048)
    queued = first_token(2048, leg_tokens=8 * 2048, leg_prompts=8)
    assert queued == pytest.approx(9 * alone, rel=0.02)
    reported = first_token(2048, waiting_tokens=8 * 2048, num_waiting=8)
    assert reported == pytest.approx(queued)
    long = first_token(2048, leg_tokens=8 * 2048, leg_prompts=1)
    assert long > 1.2 * queued


def test_patience_keeps_prompts_with_their_prefill_worker():
    """What is cheaper by less does not have placement flap; infinite patience never leaves."""
    behind = fleet_of({"waiting_tokens": 20_000}, BUSY_D)
    assert way_of(prompt_of(2048), behind) == "decode"
    assert way_of(prompt_of(2048), behind, patience=10.0) == "pair"
    assert way_of(prompt_of(2048), fleet_of(consumer=FULL_D), patience=math.inf) == "pair"


def _refused(refusal):
    """D's word."""
    return AttemptFailure(
        worker=inc(2), worker_name="D", pair=PAIR, message="full", refusal=refusal
    )


def test_a_full_decode_worker_leaves_it_to_who_computed():
    """D refuses for want of room after P computed: P goes on with what it has."""
    ladder = Ladder(3)
    refusal = Refusal(code=RefusalCode.CAPACITY, message="full")
    ladder.record(_refused(refusal))
    prompt = prompt_of(2048, hits={inc(1): 2032})
    assert way_of(prompt, fleet_of(consumer=BUSY_D), ladder.exclusions) == "prefill"
    placement = policy().place(prompt, fleet_of(consumer=BUSY_D), 0.0, ladder.exclusions)
    assert placement.worker == inc(1)
    assert placement.prefill is None
    assert placement.forecast.ttft < 0.01  # nothing is computed again


def test_without_a_decode_worker_nobody_decodes():
    """A lost one comes back; a service without any is not whole."""
    fleet = fleet_of()
    alone = FleetSnapshot(fleet.workers[:1])
    assert policy().place(prompt_of(2048), alone, 0.0, NONE) is None


def test_before_anything_was_measured_tokens_decide():
    """The first prompt of all is handed over, with no forecast."""
    fleet = fleet_of({"prompt_steps": ()}, {"prompt_steps": ()})
    placement = policy().place(prompt_of(2048), fleet, 0.0, NONE)
    assert placement.pair == PAIR
    assert placement.forecast is None


def test_the_numbers_are_said():
    """Of the way that was taken, and of the best that was not."""
    placement = policy().place(prompt_of(2048), fleet_of(consumer=BUSY_D), 0.0, NONE)
    assert "pair" in placement.rule
    assert "; not " in placement.rule
    assert "first token 4" in placement.rule
    assert {each.way for each in placement.considered} == {"pair", "decode", "prefill"}
    costs = [each.cost for each in placement.considered]
    assert costs == sorted(costs)


def test_room_comes_back_as_requests_end():
    """Blocks that lack, over those in use, for as long as requests stay."""
    full = view(2, D, **{**MEASURED, **FULL_D, "free_blocks": 0})
    half = wait_for_room(prompt_of(160_000 - 16), full)
    assert half == pytest.approx(10_000 / 20_000 * 2.0, rel=0.01)
    assert wait_for_room(prompt_of(16), view(2, D, **MEASURED)) == 0.0


def test_a_queue_for_seats_is_waited_out_as_often_as_seats_change_hands():
    """Those that run free a seat each; whoever waits behind further ones waits for these, too."""
    seats = {**MEASURED, "max_num_seqs": 2, "num_running": 2}
    assert wait_for_room(prompt_of(16), view(2, D, **{**seats, "num_running": 1})) == 0.0
    assert wait_for_room(prompt_of(16), view(2, D, **seats)) == pytest.approx(1.0)
    assert wait_for_room(prompt_of(16), view(2, D, **seats, num_waiting=9)) == pytest.approx(10.0)


@pytest.mark.parametrize(("waiting", "way"), [(0, "pair"), (12, "prefill")])
def test_a_queue_of_short_answers_is_long_as_well(waiting, way):
    """Half a second each: a prefill worker with nothing to do sends few prompts to wait for two
    seats, and goes on itself before it sends one more behind a dozen. By the times of a core."""
    steps = {"prompt_steps": ((16, 0.03), (512, 1.0)), "decode_steps": ((1, 0.02), (2, 0.026))}
    times = {**steps, "max_num_seqs": 2, **CHUNKS}
    producer = {**times, "residence_s": 0.05, "prompt_share": 0.1, "prompts_per_s": 1.0}
    consumer = {**times, "residence_s": 0.5, "num_running": 2, "num_waiting": waiting}
    elastic = ElasticPolicy(0, 0.05, Targets(5.0, 0.5))
    placement = elastic.place(prompt_of(64), fleet_of(producer, consumer), 0.0, NONE)
    assert placement is not None
    assert placement.forecast is not None
    assert placement.forecast.way == way


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(1, 30_000),
    more=st.integers(0, 9_000),
    waiting=st.integers(0, 60_000),
    ahead=st.integers(0, 60_000),
    decoding=st.integers(0, 256),
    free=st.integers(0, 20_000),
)
def test_forecasts_never_fall_with_length_or_queue(tokens, more, waiting, ahead, decoding, free):
    """A longer prompt, or a longer queue, never comes sooner or costs less, whichever way."""
    busy = {"num_running": decoding, "num_decoding": decoding, "chunk_tokens": 700}
    busy["free_blocks"] = free

    def of(length, queue):
        fleet = fleet_of({"waiting_tokens": queue}, {"waiting_tokens": queue, **busy})
        ways = policy().forecasts(prompt_of(length), fleet, NONE)
        return {each.way: each for each in ways}

    base = of(tokens, waiting)
    for other in (of(tokens + more, waiting), of(tokens, waiting + ahead)):
        for way, forecast in base.items():
            if way in other:
                assert other[way].ttft >= forecast.ttft - 1e-9
                if way != "prefill":  # prompts that are late anyway miss nothing more for it
                    assert other[way].cost >= forecast.cost - 1e-9


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(1, 5_000),
    blocks=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    longest=st.tuples(st.integers(16, 6_000), st.integers(16, 6_000)),
)
def test_nobody_is_chosen_who_cannot_hold_it(tokens, blocks, longest):
    """Neither by blocks nor by context, alone or in a pair."""
    fields = [
        {"total_blocks": count, "free_blocks": count, "max_model_len": length}
        for count, length in zip(blocks, longest, strict=True)
    ]
    fleet = fleet_of(*fields)
    for way in policy().forecasts(PromptFacts(num_tokens=tokens), fleet, NONE):
        for each in fleet.workers:
            if each.incarnation in (way.worker, way.prefill):
                assert tokens < each.max_model_len
                assert tokens < each.total_blocks * each.block_size
