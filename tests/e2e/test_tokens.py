"""Every layout gives the tokens that transformers gives, and sampled ones agree among layouts."""

from __future__ import annotations

from typing import Any

import pytest
from client import gather
from conftest import StackMaker
from reference import judge, rows
from stack import Stack

SOME = (0, 9, 18, 26, 33, 40, 46)
"""Rows of up to 690 tokens: of every kind, a shared prefix among them."""
ALL = tuple(range(64))

AGGREGATED: dict[str, Any] = {"prefill": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "aggregated": AGGREGATED,
    "aggregated, chunks of 64": {**AGGREGATED, "worker_flags": ["--max-num-batched-tokens", "64"]},
    "aggregated, preempted": {
        **AGGREGATED,
        "worker_flags": ["--num-gpu-blocks-override", "210", "--watermark", "0"],
    },
    "pair": {},
    "pair, chunks of 64": {"worker_flags": ["--max-num-batched-tokens", "64"]},
    "pair, chunks of 256": {"worker_flags": ["--max-num-batched-tokens", "256"]},
    "pair, blocks of 64": {"worker_flags": ["--block-size", "64"]},
    "pair, preempted": {"worker_flags": ["--num-gpu-blocks-override", "210", "--watermark", "0"]},
    "two of each": {"prefill": 2, "decode": 2},
    "three of each": {"prefill": 3, "decode": 3},
}
QUICK = ("aggregated", "pair, chunks of 64", "pair, preempted", "two of each")


async def check(stack: Stack, indices: tuple[int, ...]) -> int:
    """Ask for the rows' answers and hold them to the judge; how many were excused."""
    answers = await gather(stack.url, [rows()[index].prompt for index in indices])
    failed = [answer.error for answer in answers if answer.error]
    assert not failed, failed
    tokens = {index: answer.tokens for index, answer in zip(indices, answers, strict=True)}
    wrong, excused = judge(tokens)
    assert not wrong, wrong
    return excused


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", QUICK)
async def test_some_prompts_equal_transformers(layout: str, start_stack: StackMaker) -> None:
    """Greedy tokens equal transformers', the first time and again with prefix hits."""
    with start_stack(**LAYOUTS[layout]) as stack:
        excused = await check(stack, SOME) + await check(stack, SOME)
        if "prefill-0" in stack.workers:
            decodes = [name for name in stack.workers if name.startswith("decode")]
            assert sum(stack.total(name, "tandem:kv_handoff_bytes_total") for name in decodes) > 0
        print(f"{layout}: {excused} excused")


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_all_prompts_equal_transformers(layout: str, start_stack: StackMaker) -> None:
    """All 64 prompts times 64 tokens, twice, in every layout."""
    with start_stack(**LAYOUTS[layout]) as stack:
        excused = await check(stack, ALL) + await check(stack, ALL)
        print(f"{layout}: {excused} excused of {2 * len(ALL)}")
        assert excused <= 4


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_sampled_tokens_are_the_same_in_every_layout(start_stack: StackMaker) -> None:
    """A seed draws the same tokens aggregated, handed over, and from the prefix cache."""
    prompts = [rows()[index].prompt for index in SOME[:5]]
    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 24}
    drawn = []
    for layout in ("aggregated", "pair, chunks of 64"):
        with start_stack(**LAYOUTS[layout]) as stack:
            for _ in range(2):
                answers = await gather(stack.url, prompts, **settings)
                drawn.append([answer.tokens for answer in answers])

    assert all(tokens for tokens in drawn[0])
    assert all(other == drawn[0] for other in drawn[1:])
