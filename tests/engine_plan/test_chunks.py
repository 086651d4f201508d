"""Chunks of prompts, alone or not, and the prompts that begin in one step."""

from typing import Any

import pytest
from tests.engine_plan.builders import Harness, request_of

from tandem.engine.config.scheduler import SchedulerConfig
from tandem.engine.timing import Chunks


def cut(config: SchedulerConfig, num_tokens: int, *, alone: bool) -> list[int]:
    """Return the sizes of all chunks of a prompt."""
    chunks = Chunks(config)
    found: list[int] = []
    while (rest := num_tokens - sum(found)) > 0:
        found.append(chunks.count(rest, 1 << 20, alone=alone))
    return found


def config(**settings: Any) -> SchedulerConfig:
    """Steps of 512 tokens, of a prompt 64."""
    return SchedulerConfig(max_num_batched_tokens=512, long_prefill_token_threshold=64, **settings)


@pytest.mark.parametrize(
    ("settings", "alone", "sizes"),
    [
        ({}, True, [64, 64, 64, 8]),
        ({"lone_prefill_token_threshold": 512}, True, [200]),
        ({"lone_prefill_token_threshold": 512}, False, [64, 64, 64, 8]),
        ({"lone_prefill_token_threshold": 160}, True, [160, 40]),
    ],
)
def test_a_prompt_is_cut_for_those_who_wait_for_it(settings, alone, sizes):
    """A prompt is cut by the usual chunk next to others, and by a larger one alone."""
    assert cut(config(**settings), 200, alone=alone) == sizes


def planned(harness: Harness) -> list[tuple[int, int]]:
    """Sequence and tokens of each prompt row of the next plan."""
    plan = harness.core.scheduler.schedule()
    assert plan is not None
    return [(row.seq, row.num_scheduled_tokens) for row in plan.rows]


def test_prompts_that_begin_together_hold_so_many_tokens():
    """One after the other the first is done sooner; short ones still share a step."""
    harness = Harness(max_num_batched_tokens=64, max_num_begun_tokens=24, num_blocks=64)
    for number, length in enumerate((20, 20, 8, 8)):
        harness.add(request_of(f"r{number}", prompt=length))
    assert [tokens for _, tokens in planned(harness)] == [20, 4]


def test_a_prompt_that_begins_alone_is_not_cut_for_others():
    harness = Harness(max_num_batched_tokens=64, max_num_begun_tokens=24, num_blocks=64)
    harness.add(request_of("a", prompt=60))
    assert [tokens for _, tokens in planned(harness)] == [60]


def test_a_lone_prompt_takes_the_larger_chunk_until_another_waits():
    harness = Harness(
        max_num_batched_tokens=64,
        long_prefill_token_threshold=8,
        lone_prefill_token_threshold=32,
        num_blocks=64,
    )
    harness.add(request_of("a", prompt=60))
    assert [tokens for _, tokens in planned(harness)] == [32]
    harness.add(request_of("b", prompt=20))
    assert [tokens for _, tokens in planned(harness)] == [8, 8]
