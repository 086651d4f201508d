"""Placement by predicted cost: the way that is taken in each situation, by measured times."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.builders import STRICT, inc, view

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import Refusal, RefusalCode
from tandem.protocol.messages import DecodeBatch
from tandem.router.dispatch.retry_policy import AttemptFailure, RetryPolicy
from tandem.router.placement.forecast import Targets, miss_chance
from tandem.router.placement.policy import PlacementPolicy
from tandem.router.placement.rates import Rates, measured, with_mixed_chunk
from tandem.router.placement.snapshot import (
    Arrivals,
    Exclusions,
    FleetSnapshot,
    LinkThroughput,
    PromptFacts,
    wait_for_room,
)

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
"""Prefill workers that could decode within the target, and whether others' prompts would wait."""
NONE = Exclusions()


def fleet_of(producer=None, consumer=None, throughput=None, arrivals=None):
    """Return one linked worker of each role with the times of a large GPU."""
    prefill = view(1, P, **{**MEASURED, "chunk_tokens": 2048, **(producer or {})})
    decode = view(2, D, **{**MEASURED, "chunk_tokens": 8192, **(consumer or {})})
    throughput = throughput or LinkThroughput(12e9)
    fleet = FleetSnapshot((prefill, decode), frozenset([PAIR]), {PAIR: throughput})
    return replace(fleet, arrivals=arrivals or Arrivals())


def policy(patience=0.05, targets=Targets(0.3, 0.025)):  # noqa: B008 - frozen
    """Return a policy with the router's defaults."""
    return PlacementPolicy(targets, patience)


def placed(prompt, fleet, exclusions=NONE, patience=0.05):
    """Return the placement, which must be there."""
    placement = policy(patience).place(prompt, fleet, exclusions)
    assert placement is not None
    assert placement.forecast is not None
    return placement


def way_of(prompt, fleet, exclusions=NONE, patience=0.05):
    return placed(prompt, fleet, exclusions, patience).forecast.way


def ways_of(prompt, fleet, exclusions=NONE):
    placement = policy().place(prompt, fleet, exclusions)
    return {} if placement is None else {each.way: each for each in placement.considered}


def prompt_of(tokens, **fields):
    """Return a prompt whose answer has some 256 tokens."""
    return PromptFacts(num_tokens=tokens, max_new_tokens=256, **fields)


@pytest.mark.parametrize(
    ("tokens", "hits", "producer", "consumer", "throughput", "way"),
    [
        (2048, 0, {}, {}, None, "pair"),
        (2048, 0, {}, BUSY_D, None, "pair"),
        (30_000, 0, {}, BUSY_D, None, "pair"),
        (64, 0, {}, {}, None, "pair"),
        (2048, 2040, {"waiting_tokens": 2048}, BUSY_D, None, "decode"),
        (2048, 0, {"waiting_tokens": 20_000}, BUSY_D, None, "decode"),
        (2048, 0, {"leg_tokens": 20_000}, BUSY_D, None, "decode"),
        (2048, 0, {}, BUSY_D, LinkThroughput(1e9, 2_000_000_000), "decode"),
        (2048, 0, {"token_bytes": 147_456.0}, BUSY_D, LinkThroughput(100e6), "decode"),
        (2048, 0, QUIET_P, FULL_D, None, "prefill"),
        (2048, 0, BUSY_P, FULL_D, None, "pair"),
        (2048, 0, {"residence_s": 0.1}, {**FULL_D, "residence_s": 0.1}, None, "pair"),
    ],
)
def test_situations(tokens, hits, producer, consumer, throughput, way):
    """P idle or with a queue; D empty, busy or full; a slow link; prompts of any length."""
    prompt = prompt_of(tokens, hits={inc(2): hits})
    assert way_of(prompt, fleet_of(producer, consumer, throughput)) == way


def test_a_queue_takes_as_long_as_its_prompts():
    """Eight prompts of 2,048 tokens are not one of 16,384 that attends to itself."""
    times = {"steepness": 4.2e-5, "chunk_tokens": 2048}

    def first_token(tokens, **queue):
        return placed(prompt_of(tokens), fleet_of({**times, **queue}), patience=9e9).forecast.ttft

    alone = first_token(2048)
    queued = first_token(2048, leg_tokens=8 * 2048, leg_prompts=8)
    assert queued == pytest.approx(9 * alone, rel=0.02)
    reported = first_token(2048, waiting_tokens=8 * 2048, num_waiting=8)
    assert reported == pytest.approx(queued)
    long = first_token(2048, leg_tokens=8 * 2048, leg_prompts=1)
    assert long > 1.2 * queued


def test_patience_keeps_prompts_with_their_prefill_worker():
    """A way that is cheaper by less than the patience is not taken; strict placement never is."""
    behind = fleet_of({"waiting_tokens": 20_000}, BUSY_D)
    assert way_of(prompt_of(2048), behind) == "decode"
    assert way_of(prompt_of(2048), behind, patience=10.0) == "pair"
    strict = STRICT.place(prompt_of(2048), fleet_of(consumer=FULL_D), NONE)
    assert strict is not None
    assert {each.way for each in strict.considered} == {"pair"}


def test_a_full_decode_worker_leaves_the_request_to_the_prefill_worker():
    """D refuses for want of room after P computed: P decodes what it computed."""
    retry_policy = RetryPolicy(3)
    refusal = Refusal(code=RefusalCode.CAPACITY, message="full")
    failure = AttemptFailure(
        worker=inc(2), worker_name="D", pair=PAIR, message="full", refusal=refusal
    )
    retry_policy.record(failure)
    prompt = prompt_of(2048, hits={inc(1): 2032})
    placement = placed(prompt, fleet_of(consumer=BUSY_D), retry_policy.exclusions)
    assert (placement.forecast.way, placement.worker) == ("prefill", inc(1))
    assert placement.prefill is None
    assert placement.forecast.ttft < 0.01  # nothing is computed again


def test_without_a_decode_worker_nothing_is_placed():
    """A lost one comes back; a service without any is not whole."""
    fleet = fleet_of()
    alone = FleetSnapshot(fleet.workers[:1])
    assert policy().place(prompt_of(2048), alone, NONE) is None


def test_before_a_prompt_was_measured_all_are_handed_over():
    """Queues still decide between workers, by assumed times."""
    unknown = {"prompt_steps": (), "decode_steps": ()}
    fleet = fleet_of({**unknown, "waiting_tokens": 50_000}, unknown)
    assert measured(fleet.workers) is None
    assert placed(prompt_of(2048), fleet).pair == PAIR
    idle = view(3, P, max_model_len=40_000)
    more = replace(fleet, workers=(*fleet.workers, idle), links=frozenset([PAIR, (inc(3), inc(2))]))
    assert placed(prompt_of(2048), more).prefill == inc(3)


def test_requests_spread_over_workers_whose_steps_take_the_same():
    workers = [view(n, D, **MEASURED, num_legs=legs) for n, legs in ((1, 2), (2, 0), (3, 1))]
    assert placed(prompt_of(100), FleetSnapshot(tuple(workers))).worker == inc(2)


def test_the_rule_gives_the_numbers():
    """It has those of the way that was taken, and of the best that was not."""
    placement = placed(prompt_of(2048), fleet_of(consumer=BUSY_D))
    assert "pair" in placement.rule
    assert "; not " in placement.rule
    assert "first token 4" in placement.rule
    assert {each.way for each in placement.considered} == {"pair", "decode", "prefill"}
    costs = [each.cost for each in placement.considered]
    assert costs == sorted(costs)


def test_room_comes_back_as_requests_end():
    """The wait is the share of blocks that lack, times the time that requests stay."""
    full = view(2, D, **{**MEASURED, **FULL_D, "free_blocks": 0})
    half = wait_for_room(prompt_of(160_000 - 16), full)
    assert half == pytest.approx(10_000 / 20_000 * 2.0, rel=0.01)
    assert wait_for_room(prompt_of(16), view(2, D, **MEASURED)) == 0.0


def test_a_queue_for_seats_takes_as_long_as_requests_stay():
    """Each running request frees one seat; requests that wait before this one take those."""
    seats = {**MEASURED, "max_num_seqs": 2, "num_running": 2}
    assert wait_for_room(prompt_of(16), view(2, D, **{**seats, "num_running": 1})) == 0.0
    assert wait_for_room(prompt_of(16), view(2, D, **seats)) == pytest.approx(1.0)
    assert wait_for_room(prompt_of(16), view(2, D, **seats, num_waiting=9)) == pytest.approx(10.0)


@pytest.mark.parametrize(("waiting", "way"), [(0, "pair"), (12, "prefill")])
def test_a_queue_of_short_answers_is_long_as_well(waiting, way):
    """An idle prefill worker decodes itself before it adds to a dozen that wait for two seats."""
    steps = {"prompt_steps": ((16, 0.03), (512, 1.0)), "decode_steps": ((1, 0.02), (2, 0.026))}
    times = {**steps, "max_num_seqs": 2, **CHUNKS}
    producer = {**times, "residence_s": 0.05, "prompt_share": 0.1, "prompts_per_s": 1.0}
    consumer = {**times, "residence_s": 0.5, "num_running": 2, "num_waiting": waiting}
    placement = policy(targets=Targets(5.0, 0.5)).place(
        prompt_of(64), fleet_of(producer, consumer), NONE
    )
    assert placement is not None
    assert placement.forecast is not None
    assert placement.forecast.way == way


@given(st.floats(1e-6, 1e3), st.floats(0, 10), st.sampled_from([6.0, 40.0]))
def test_longer_is_never_less_likely_to_miss(seconds, more, sharpness):
    """The chance is a half at the target."""
    assert miss_chance(0.3, 0.3, sharpness) == pytest.approx(0.5)
    chances = [miss_chance(each, 0.3, sharpness) for each in (seconds, seconds + more)]
    assert 0 <= chances[0] <= chances[1] <= 1


def test_prompts_that_come_after_this_one_count():
    """The more come, the more miss for a prompt that lengthens the queue."""
    queue = {"waiting_tokens": 12_000}
    missing = [
        ways_of(prompt_of(2048), fleet_of({**queue, "prompts_per_s": rate}))["pair"].missing
        for rate in (0.0, 5.0, 20.0)
    ]
    assert missing == sorted(missing)
    assert missing[-1] > missing[0] + 0.3
    beyond = {"waiting_tokens": 120_000, "prompts_per_s": 20.0}
    late = ways_of(prompt_of(2048), fleet_of(beyond))["pair"].missing
    assert late > missing[-1], "a queue that is late already is no reason to lengthen it"


def test_steps_over_the_target_count_for_every_stream():
    """A long prompt in wide steps makes all decodes next to it miss; narrow steps make none."""
    wide = {**BUSY_D, "mixed_chunk_tokens": 2000}
    bounded = {**BUSY_D, "mixed_chunk_tokens": 300, "chunk_tokens": 300}
    missing = [
        ways_of(prompt_of(20_000), fleet_of(consumer=each))["decode"].missing
        for each in (wide, bounded)
    ]
    assert missing[0] > 40
    assert missing[1] < 5


def test_decoding_keeps_a_prefill_worker_from_prompts():
    """By the prompts of the whole fleet, reported or as this router was asked for them."""

    def missing(producer, arrivals=None):
        fleet = fleet_of({**CHUNKS, **producer}, arrivals=arrivals)
        return ways_of(prompt_of(2048), fleet)["prefill"].missing

    assert missing({"prompts_per_s": 0.5, "prompt_share": 0.02}) < 1
    assert missing({"prompts_per_s": 18.0, "prompt_share": 0.85}) < 1, "itself it is not late"
    costs = [
        ways_of(prompt_of(2048), fleet_of({**CHUNKS, **each}, arrivals=come))["prefill"].cost
        for each, come in (
            (QUIET_P, None),
            (BUSY_P, None),
            (QUIET_P, Arrivals(22.0, 22 * 2048.0)),
        )
    ]
    assert costs[1] > costs[0] + 1
    assert costs[2] > costs[0] + 1


def test_answers_count_where_nothing_is_late():
    """A decode that makes other answers longer costs, by a tenth of the seconds."""
    few = ways_of(prompt_of(2048), fleet_of(consumer={**BUSY_D, "num_decoding": 5}))["decode"]
    many = ways_of(prompt_of(2048), fleet_of(consumer=BUSY_D))["decode"]
    assert many.answers > few.answers
    short = ways_of(prompt_of(2048) and PromptFacts(num_tokens=2048, max_new_tokens=2), fleet_of())
    assert short["decode"].answers < 0.1


def test_times_of_other_workers_stand_in():
    """A worker that has made no step of a kind is assumed to take as long as the first that has."""
    d = view(2, D, decode_steps=((1, 0.006), (50, 0.012)), context_s=1e-7)
    p = view(1, P, prompt_steps=((500, 0.0125),), steepness=4e-5)
    known = measured((p, d))
    assert known is not None
    mixed = known.of(view(3, D))
    assert mixed == Rates(d.decode_steps, p.prompt_steps, (), 1e-7, 4e-5)
    assert mixed.step(DecodeBatch(50), 500) == pytest.approx(0.012 + 0.0125, rel=0.02)
    assert mixed.compute(500, 1000, DecodeBatch(0), 20_000) == pytest.approx(
        1.8 * mixed.compute(500, 1000, DecodeBatch(0)), rel=0.06
    )
    assert mixed.mixed_chunk(view(3, D, mixed_chunk_tokens=800, bounds_steps=True), 25_000) == 400


def test_a_worker_that_has_made_no_mixed_step_is_assumed_to_fill_the_target():
    """It reports the least chunk until then, by which it would never be sent a prompt."""
    known = measured((view(1, P, prompt_steps=((2000, 0.04),), decode_steps=((1, 0.006),)),))
    assert known is not None
    new = view(2, D, bounds_steps=True, mixed_chunk_tokens=64, chunk_tokens=64, num_decoding=4)
    seen = with_mixed_chunk(new, known.of(new), 0.025)
    assert known.step(DecodeBatch(4), seen.mixed_chunk_tokens) == pytest.approx(
        0.8 * 0.025, rel=0.01
    )
    assert seen.chunk_tokens == seen.mixed_chunk_tokens
    measured_one = replace(new, mixed_steps=((64, 0.001),))
    assert with_mixed_chunk(measured_one, known.of(measured_one), 0.025) is measured_one


def test_contexts_of_requests_since_the_report_are_like_the_others():
    """The report is a second old; streams are known at once."""
    worker = view(2, D, num_decoding=4, context_tokens=8_000, num_streams=6)
    assert worker.decode_batch == DecodeBatch(6, 12_000)
    assert view(2, D, num_streams=6).decode_batch == DecodeBatch(6, 0)


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
        return ways_of(prompt_of(length), fleet)

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
    blocks=st.lists(st.integers(1, 300), min_size=4, max_size=4),
    longest=st.lists(st.integers(16, 6_000), min_size=4, max_size=4),
)
def test_no_worker_is_chosen_that_cannot_hold_the_prompt(tokens, blocks, longest):
    """Neither by context, nor by blocks if another worker of the role has enough."""
    workers = [
        view(n, role, total_blocks=count, free_blocks=count, max_model_len=length)
        for n, (role, count, length) in enumerate(zip((P, P, D, D), blocks, longest, strict=True))
    ]
    links = frozenset((p.incarnation, d.incarnation) for p in workers[:2] for d in workers[2:])
    fleet = FleetSnapshot(tuple(workers), links)
    holds = {each.incarnation: each.total_blocks * 16 > tokens for each in workers}
    for way in ways_of(PromptFacts(num_tokens=tokens), fleet).values():
        for each in workers:
            if each.incarnation in (way.worker, way.prefill):
                assert tokens < each.max_model_len
                others = [o for o in workers if o.role is each.role and tokens < o.max_model_len]
                could = any(holds[other.incarnation] for other in others)
                assert holds[each.incarnation] or not could


def test_infinite_patience_hands_everything_over():
    """As strict placement does, but a prompt without a pair may go to a prefill worker."""
    assert way_of(prompt_of(2048), fleet_of(consumer=FULL_D), patience=math.inf) == "pair"
