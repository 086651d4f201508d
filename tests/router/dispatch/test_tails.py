"""What a link once took is believed for a while: none is given up for one late word."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from msgspec.structs import replace
from tests.router.behaviours import Make, behind, has_read
from tests.router.builders import Stack, beats, inc, make_request

from tandem.protocol.messages import LoadReport
from tandem.router.dispatch.tails import LASTS, Tails
from tandem.router.placement.damage import Targets
from tandem.router.placement.elastic import ElasticPolicy
from tandem.router.placement.snapshot import Exclusions, PromptFacts

PAIR = (inc(1), inc(2))
LOAD = LoadReport(
    num_running=0,
    num_waiting=0,
    waiting_tokens=0,
    free_blocks=20_000,
    total_blocks=20_000,
    residence_s=2.0,
    prompt_steps=((64, 0.0045), (512, 0.0113), (2048, 0.0445)),
    decode_steps=((1, 0.00407), (64, 0.00688), (256, 0.017)),
)
"""Of a large GPU."""


async def test_a_pair_is_chosen_again_after_one_late_word(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """Nothing goes over a link that seems slow, so nothing would ever show that it is not."""
    producer = prefill(load=replace(LOAD, chunk_tokens=2048))
    mixed = replace(LOAD, chunk_tokens=700, num_running=50, num_decoding=50)
    consumer = decode(load=mixed)
    await stack.find(producer, consumer)
    for each in (producer, consumer):
        await beats(stack, each)
    pair = (producer.incarnation, consumer.incarnation)
    policy = ElasticPolicy(0, 0.1, Targets(0.3, 0.025))

    def way(now: float) -> str:
        placement = policy.place(
            PromptFacts(num_tokens=1500, max_new_tokens=256),
            stack.fleet.snapshot(now),
            now,
            Exclusions(),
        )
        assert placement is not None
        assert placement.forecast is not None
        return placement.forecast.way

    assert way(0.0) == "pair"
    stack.fleet.tails.note(pair, 5.0, 0.0)
    assert way(1.0) != "pair"
    assert way(60.0) == "pair"
    stack.fleet.tails.sent(pair, 60.0)
    assert way(60.0) != "pair"  # one is enough to see whether it is slow still
    stack.fleet.tails.note(pair, 0.02, 60.1)
    assert way(60.1) == "pair"


async def test_of_a_link_that_was_slow_one_hand_off_shows_whether_it_is(
    stack: Stack, prefill: Make, decode: Make
) -> None:
    """All that come while it is under way go elsewhere; afterwards nothing is left of what was."""
    p, d = prefill(), decode(behaviour=behind(has_read(stack)))
    await stack.find(p, d)
    pair, tails = (p.incarnation, d.incarnation), stack.fleet.tails
    tails.note(pair, 5.0, stack.now - LASTS - 1)
    assert tails.of(pair, stack.now) is None
    seen = []
    async with aclosing(stack.stream(make_request())) as outputs:
        async for _ in outputs:
            seen.append(tails.of(pair, stack.now))  # noqa: PERF401  each as it is then

    assert seen[0] is not None
    assert seen[0].mean == 5.0
    assert seen[-1] is not None
    assert seen[-1].mean < 5.0
    assert not seen[-1].on_trial


def test_a_trial_that_shows_nothing_is_followed_by_another() -> None:
    """Its client may have left, or its worker may be gone."""
    tails = Tails()
    tails.note(PAIR, 5.0, 0.0)
    tails.sent(PAIR, 10.0)
    assert tails.of(PAIR, LASTS + 1) is None  # who went by what is known is no trial
    tails.sent(PAIR, LASTS + 1)
    tails.sent(PAIR, LASTS + 2)
    assert tails.of(PAIR, 2 * LASTS) is not None
    assert tails.of(PAIR, 2 * LASTS + 2) is None


def test_an_old_tail_is_no_part_of_the_next_mean() -> None:
    """Else the first hand-off of the link that comes in time would leave it as slow as it was."""
    tails = Tails()
    tails.note(PAIR, 5.0, 0.0)
    tails.note(PAIR, 0.02, LASTS)
    late = tails.of(PAIR, LASTS)
    assert late is not None
    assert late.mean == pytest.approx(4.004)
    tails.note(PAIR, 0.02, 2 * LASTS + 1)
    fresh = tails.of(PAIR, 2 * LASTS + 1)
    assert fresh is not None
    assert (fresh.mean, fresh.spread) == (0.02, 0.0)


def test_tails_go_with_either_end() -> None:
    """Others' stay."""
    tails = Tails()
    for pair in (PAIR, (inc(1), inc(3)), (inc(4), inc(2))):
        tails.note(pair, 0.02, 0.0)
    tails.forget(inc(1))
    assert [tails.of(pair, 0.0) is None for pair in (PAIR, (inc(1), inc(3)))] == [True, True]
    assert tails.of((inc(4), inc(2)), 0.0) is not None
