"""Steps with decodes have a bound of tokens that grows with the decodes."""

import pytest
from tests.engine_plan.builders import Harness, request_of
from tests.engine_plan.plans import long_running, next_plan, shape_of

from tandem.engine.config import SchedulerConfig


def harness_of(decodes: int, **flat) -> Harness:
    """Steps of up to 4,096 tokens; so many sequences decode."""
    harness = Harness(1000, max_num_batched_tokens=4096, max_num_seqs=256, **flat)
    for number in range(decodes):
        harness.add(request_of(f"d{number}", 4, params=long_running(max_tokens=50)))
    if decodes:
        next_plan(harness)
    return harness


@pytest.mark.parametrize(
    ("decodes", "tokens"), [(0, 3000), (1, 1024), (128, 1024), (200, 1600), (255, 2040)]
)
def test_the_bound_grows_with_the_decodes(decodes, tokens):
    """Eight tokens for each that decodes and 1,024 at least; without any the whole budget."""
    harness = harness_of(decodes, mixed_tokens_per_decode=8, least_mixed_tokens=1024)
    harness.add(request_of("prompt", 3000))

    assert sum(row.num_scheduled_tokens for row in next_plan(harness).rows) == tokens


def test_without_the_bound_the_budget_decides():
    """Decodes do not shorten a prompt's chunk."""
    config = SchedulerConfig(max_num_batched_tokens=4096)

    assert {config.mixed_tokens(n) for n in (1, 256)} == {4096}


def test_a_cpu_bounds_them_by_default():
    """Streams go on beside a long prompt: the step has 64 tokens, not the whole budget."""
    harness = harness_of(1)
    harness.add(request_of("prompt", 3000))

    assert sum(row.num_scheduled_tokens for row in next_plan(harness).rows) == 64


def test_the_last_token_of_a_prompt_is_no_decode():
    """A prompt of which one token is left makes no step short: nobody waits for his next token."""
    harness = Harness(1000, max_num_batched_tokens=2048, mixed_tokens_per_decode=2)
    harness.add(request_of("a", 2049))
    assert shape_of(next_plan(harness)) == [(0, 0, 2048, ())]
    harness.add(request_of("b", 2000))

    assert shape_of(next_plan(harness)) == [(0, 2048, 1, (0,)), (1, 0, 2000, (0,))]


@pytest.mark.parametrize("least", [None, 128, 1024])
@pytest.mark.parametrize("ratio", [2, 8, 12])
@pytest.mark.parametrize("budget", [1025, 2048, 8192])
def test_a_prompt_gets_on_beside_any_number_of_decodes(ratio, budget, least):
    """Wherever the budget itself has room for more than the decodes, the bound has, too."""
    config = SchedulerConfig(
        max_num_seqs=budget - 1,
        max_num_batched_tokens=budget,
        mixed_tokens_per_decode=ratio,
        least_mixed_tokens=least,
    )

    assert all(config.mixed_tokens(n) > n for n in range(1, budget))
    assert max(map(config.mixed_tokens, range(1, budget))) == budget
