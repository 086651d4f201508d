"""Times of steps: what is kept of them, and steps of prompts that keep within a time."""

from __future__ import annotations

import math
import random

import pytest
from tests.engine_plan.test_mixed_steps import harness_of

from tandem.engine.config.scheduler import LEAST_CHUNK_TOKENS
from tandem.engine.scheduler.stats import PromptLoad
from tandem.engine.timing import MeasuredSteps, Padding, StepRoom, cost_behind
from tandem.protocol.messages import DecodeBatch, decode_seconds, seconds_at


def measured(times: int = 20) -> MeasuredSteps:
    """Steps of 5 ms + 0.05 ms a decode, and 40,000 prompt tokens a second."""
    steps = MeasuredSteps()
    for _ in range(times):
        for decodes in (1, 10, 100):
            steps.note(DecodeBatch(decodes), 0, 0.005 + decodes * 5e-5)
        for tokens in (100, 1_000, 2_000):
            steps.note(DecodeBatch(0), tokens, tokens / 40_000)
            steps.note(DecodeBatch(10), tokens, 0.0055 + tokens / 40_000)
    steps.refresh()
    return steps


def test_medians_of_either_kind() -> None:
    steps = measured()
    steps.note(DecodeBatch(10), 0, 30.0)
    steps.note(DecodeBatch(0), 1_000, 30.0)
    steps.refresh()
    assert decode_seconds(steps.decode_steps, 10) == pytest.approx(0.0055)
    assert seconds_at(steps.prompt_steps, 1_000) == pytest.approx(0.025)
    assert seconds_at(steps.prompt_steps, 1_500) == pytest.approx(0.0375)
    assert seconds_at(steps.prompt_steps, 4_000) == pytest.approx(0.1)
    assert decode_seconds(steps.decode_steps, 200) == pytest.approx(0.015)
    assert decode_seconds((), 5) == seconds_at((), 5) == seconds_at(steps.prompt_steps, 0) == 0


def test_how_long_requests_stay() -> None:
    steps = MeasuredSteps()
    steps.note_end(2.0)
    assert steps.residence_s == 2.0
    for _ in range(100):
        steps.note_end(1.0)
    assert steps.residence_s == pytest.approx(1.0, abs=0.01)


def test_prompt_tokens_that_fit() -> None:
    """As many as keep the step within its time; none before a prompt was measured."""
    assert MeasuredSteps().prompt_tokens_within(DecodeBatch(10), 0.025, 2048) == 0
    steps = measured()
    fit = steps.prompt_tokens_within(DecodeBatch(10), 0.025, 2048)
    assert fit == pytest.approx((0.025 - 0.0055) * 40_000, abs=2)
    assert steps.prompt_tokens_within(DecodeBatch(10), 0.025, 300) == 300
    assert steps.prompt_tokens_within(DecodeBatch(10), 0.001, 2048) == 0


def test_max_itl_ms_bounds_mixed_steps() -> None:
    """By what was measured, with a chunk that lets a prompt get on; before, that chunk alone."""
    harness = harness_of(4, max_itl_ms=25.0)
    scheduler = harness.core.scheduler
    planner = scheduler._planner
    planner._measured = MeasuredSteps()
    assert planner.mixed_prompt_tokens(DecodeBatch(4)) == LEAST_CHUNK_TOKENS
    planner._measured = measured()
    assert planner.mixed_prompt_tokens(DecodeBatch(0)) == scheduler.config.max_num_batched_tokens
    assert planner.mixed_prompt_tokens(DecodeBatch(4)) == pytest.approx(780, abs=15)
    assert planner.mixed_prompt_tokens(DecodeBatch(500)) == LEAST_CHUNK_TOKENS


def test_who_has_made_no_decodes_alone_goes_by_its_shortest_prompts() -> None:
    """A worker whose prompts never end learns what decodes take from mixed steps."""
    steps = MeasuredSteps()
    for _ in range(20):
        steps.note(DecodeBatch(0), 100, 0.006)
        steps.note(DecodeBatch(0), 1000, 0.022)
    assert not steps.decode_steps
    unknown = steps.prompt_tokens_within(DecodeBatch(8), 0.022, 2048)
    assert unknown == pytest.approx(662, abs=3)  # 6 ms are taken for decodes, and 16 are left
    for _ in range(20):
        steps.note(DecodeBatch(8), 1000, 0.034)
    assert dict(steps.decode_steps)[8] == pytest.approx(0.012)
    assert steps.prompt_tokens_within(DecodeBatch(8), 0.022, 2048) < unknown


def took(streams: int, tokens: int) -> float:
    """Seconds of a step of an H100: weights are read in 6 ms, a token is multiplied in 20 us, and
    either hides behind the other."""
    return math.sqrt(math.hypot((0.006 + streams * 1e-4) ** 2, (tokens * 2e-5) ** 2))


def prefilled() -> MeasuredSteps:
    """Of a prefill worker that has made steps of prompts alone."""
    steps = MeasuredSteps()
    for _ in range(20):
        for tokens in (16, 128, 512, 2048):
            steps.note(DecodeBatch(0), tokens, took(0, tokens))
    return steps


def test_what_decodes_seem_to_need_beside_prompts_is_forgotten_once_some_were_alone() -> None:
    """A wide step with a decode in it takes what its prompts do alone, so that nothing seems left
    to the decode. By that and one step of two, six would need 30 ms, no step would have room for
    a prompt, and none would show that they need 7."""
    steps = prefilled()
    steps.note(DecodeBatch(1), 512, took(1, 512))
    assert steps.decode_seconds(DecodeBatch(1)) == pytest.approx(0.006, rel=0.02), (
        "weights are read"
    )
    steps.note(DecodeBatch(2), 0, took(2, 0))
    steps.refresh()
    for _ in range(20):
        fit = steps.prompt_tokens_within(DecodeBatch(6), 0.021, 2048)
        steps.note(DecodeBatch(6), max(64, fit), took(6, max(64, fit)))
    assert steps.decode_seconds(DecodeBatch(6)) == pytest.approx(0.0062, rel=0.05)
    assert steps.prompt_tokens_within(DecodeBatch(6), 0.021, 2048) > 600


def test_decodes_that_seemed_long_are_refuted_by_shorter_steps_of_both() -> None:
    """Two steps that were held up, of other sizes, say that eight decodes need 40 ms: no prompt
    has room, and a worker whose prompts never end makes no step of decodes alone again."""
    steps = prefilled()
    steps.note(DecodeBatch(1), 0, 0.006)
    steps.note(DecodeBatch(2), 0, 0.012)
    steps.refresh()
    assert steps.decode_seconds(DecodeBatch(8)) > 0.04
    for _ in range(20):
        fit = steps.prompt_tokens_within(DecodeBatch(8), 0.021, 2048)
        steps.note(DecodeBatch(8), max(64, fit), took(8, max(64, fit)))
    assert steps.decode_seconds(DecodeBatch(8)) < 0.010
    assert steps.prompt_tokens_within(DecodeBatch(8), 0.021, 2048) > 500


def test_what_prompts_take_of_the_time() -> None:
    """A share and a count a second, which fade when nothing comes."""
    load = PromptLoad()
    for step in range(400):
        load.note(0.05, 1, 0.1 * step)
    busy = load.report(40.0)
    assert busy[0] == pytest.approx(0.5, abs=0.02)
    assert busy[1] == pytest.approx(10, abs=0.4)
    load.note(-1.0, 0, 40.0)  # a step that took less than its decodes do
    assert load.report(40.0) == busy
    assert load.report(70.0)[0] < 0.01


def test_contexts_are_told_from_numbers() -> None:
    """Streams with contexts of their own: 5 ms, 0.05 ms a stream and 50 ns a token of context. A
    step of as many streams with longer contexts is foretold longer."""
    draw, steps = random.Random(1), MeasuredSteps()
    for _ in range(2_000):
        streams = draw.randint(1, 60)
        context = sum(draw.randint(100, 8_000) for _ in range(streams))
        seconds = (0.005 + streams * 5e-5 + context * 5e-8) * draw.gauss(1.0, 0.03)
        steps.note(DecodeBatch(streams, context), 0, seconds)
    steps.refresh()
    assert steps.context_s == pytest.approx(5e-8, rel=0.1)
    short, long = DecodeBatch(40, 40 * 500), DecodeBatch(40, 40 * 8_000)
    assert steps.decode_seconds(short) == pytest.approx(0.008, rel=0.05)
    assert steps.decode_seconds(long) == pytest.approx(0.023, rel=0.05)


def test_what_contexts_do_not_show_is_not_made_up() -> None:
    """No slope from noise, from few steps, or from steps that did something else."""
    draw, steps = random.Random(2), MeasuredSteps()
    for number in range(400):
        strays = number % 50 == 0
        context = 4_000 * 8 if strays else draw.randint(100, 2_000) * 8
        steps.note(DecodeBatch(8, context), 0, 5.0 if strays else draw.gauss(0.005, 0.0002))
        if number == 100:
            steps.refresh()
            assert steps.context_s == 0.0
    steps.refresh()
    assert steps.decode_seconds(DecodeBatch(8, 8 * 4_000)) == pytest.approx(0.005, rel=0.1)


def test_a_worker_that_became_slower_is_learned_anew() -> None:
    """By medians: four times the time is no stray when all steps take it."""
    draw, steps = random.Random(3), MeasuredSteps()
    for scale in (1.0, 4.0):
        for _ in range(4_000):
            context = draw.randint(100, 8_000) * 8
            steps.note(DecodeBatch(8, context), 0, scale * (0.004 + context * 5e-8))
        steps.refresh()
    assert steps.decode_seconds(DecodeBatch(8, 8 * 6_000)) == pytest.approx(4 * 0.0064, rel=0.05)


def test_chunks_behind_a_long_context_are_shorter() -> None:
    """By the operations of attention; the first prompt of a step gets on whatever its context."""

    def most(start: int, budget: int, steepness: float = 4e-5) -> int:
        return StepRoom(Padding(), 4, budget, steepness).most(start, 2048)

    assert most(0, 500, 0.0) == 500
    assert most(10_000, 500) == pytest.approx(500 / 1.41, abs=4)
    assert most(30_000, 100) == LEAST_CHUNK_TOKENS
    assert StepRoom(Padding(), 4, 100, 4e-5).most(30_000, 10) == 10
    assert 0.97 * 500 < cost_behind(10_000, most(10_000, 500), 4e-5) <= 500


def test_max_itl_ms_counts_contexts() -> None:
    """Decodes with long contexts leave less to a prompt, and less of one behind a long context."""
    harness = harness_of(4, max_itl_ms=25.0)
    planner = harness.core.scheduler._planner
    planner._measured = measured()
    planner._measured.context_s = 5e-8
    free = planner.mixed_prompt_tokens(DecodeBatch(4, 0))
    assert planner.mixed_prompt_tokens(DecodeBatch(4, 100_000)) == pytest.approx(free - 200, abs=4)


def test_steps_that_vary_keep_within_their_bound() -> None:
    """Nearly all of them: half would not by medians. What did something else narrows nothing."""
    rng, steps, bound, late = random.Random(0), MeasuredSteps(), 0.025, []
    for number in range(3_000):
        decode_batch = DecodeBatch(rng.randrange(5, 20))
        fit = max(64, steps.prompt_tokens_within(decode_batch, bound, 2048))
        padded = -(-fit // 256) * 256  # as sizes of a device's graphs are
        varied = rng.uniform(0.9, 1.2)
        steps.note(decode_batch, 0, 0.005 + decode_batch.streams * 5e-5)
        took = (0.005 + decode_batch.streams * 5e-5 + padded / 40_000) * varied
        steps.note(decode_batch, fit, 40 * took if number % 40 == 0 else took)
        if number > 500:
            late.append(took > bound)
    assert sum(late) / len(late) < 0.04
    assert 1.05 < steps.margin < 1.5
    assert steps.prompt_tokens_within(DecodeBatch(10), bound, 2048) > 400
