"""Times of steps: what is kept of them, and steps of prompts that keep within a time."""

from __future__ import annotations

import pytest
from tests.engine_plan.test_mixed_steps import harness_of

from tandem.engine.config.scheduler import LEAST_CHUNK_TOKENS
from tandem.engine.scheduler.step_times import MeasuredSteps
from tandem.protocol.steps import decode_seconds, seconds_at


def measured(times: int = 20) -> MeasuredSteps:
    """Steps of 5 ms + 0.05 ms a decode, and 40,000 prompt tokens a second."""
    steps = MeasuredSteps()
    for _ in range(times):
        for decodes in (1, 10, 100):
            steps.note(decodes, 0, 0.005 + decodes * 5e-5)
        for tokens in (100, 1_000, 2_000):
            steps.note(0, tokens, tokens / 40_000)
            steps.note(10, tokens, 0.0055 + tokens / 40_000)
    steps.refresh()
    return steps


def test_medians_of_either_kind() -> None:
    """By size; a step that built kernels changes nothing."""
    steps = measured()
    steps.note(10, 0, 30.0)
    steps.note(0, 1_000, 30.0)
    steps.refresh()
    assert decode_seconds(steps.decode_steps, 10) == pytest.approx(0.0055)
    assert seconds_at(steps.prompt_steps, 1_000) == pytest.approx(0.025)
    assert seconds_at(steps.prompt_steps, 1_500) == pytest.approx(0.0375)
    assert seconds_at(steps.prompt_steps, 4_000) == pytest.approx(0.1)
    assert decode_seconds(steps.decode_steps, 200) == pytest.approx(0.015)
    assert decode_seconds((), 5) == seconds_at((), 5) == seconds_at(steps.prompt_steps, 0) == 0


def test_how_long_requests_stay() -> None:
    """A mean that follows."""
    steps = MeasuredSteps()
    steps.note_end(2.0)
    assert steps.residence_s == 2.0
    for _ in range(100):
        steps.note_end(1.0)
    assert steps.residence_s == pytest.approx(1.0, abs=0.01)


def test_prompt_tokens_that_fit() -> None:
    """As many as keep the step within its time; nothing is said before it is known."""
    assert MeasuredSteps().prompt_tokens_within(10, 0.025, 2048) is None
    steps = measured()
    fit = steps.prompt_tokens_within(10, 0.025, 2048)
    assert fit == pytest.approx((0.025 - 0.0055) * 40_000, abs=2)
    assert steps.prompt_tokens_within(10, 0.025, 300) == 300
    assert steps.prompt_tokens_within(10, 0.001, 2048) == 0


def test_max_itl_ms_bounds_mixed_steps() -> None:
    """By what was measured, with a chunk that lets a prompt get on; before, the other bounds do."""
    harness = harness_of(4, max_itl_ms=25.0)
    scheduler = harness.core.scheduler
    planner = scheduler._planner
    planner._measured = MeasuredSteps()
    before = planner.mixed_prompt_tokens(4)
    planner._measured = measured()
    assert planner.mixed_prompt_tokens(0) == scheduler.config.max_num_batched_tokens
    assert planner.mixed_prompt_tokens(4) != before
    assert planner.mixed_prompt_tokens(4) == pytest.approx(780, abs=15)
    assert planner.mixed_prompt_tokens(500) == LEAST_CHUNK_TOKENS
