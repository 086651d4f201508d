"""Every layout gives the tokens that transformers gives, and sampled ones agree among layouts."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
from client import gather
from conftest import StackMaker
from reference import judge, rows
from stack import Stack

SOME = (0, 9, 18, 26, 33)
"""Rows of 16 to 248 tokens: one block, one chunk, many of both."""
OTHERS = (1, 19, 24)
"""Rows of up to 117 tokens, which share no block with those."""
LATER = (28, 30)
"""Rows of 164 and 193 tokens, which share none with either."""
ALL = tuple(range(64))
FEW = 16
"""Tokens of an answer, where not all 64 are asked for: each answer begins a block of 16."""
AGAIN = 4
"""Tokens of an answer to a prompt that is cached: they show what is wrong with its KV."""
SHORT = (18, 16, 14, 12, 9, 6, 3)
"""Rows of 71 to 21 tokens: 23 blocks of 16, and 14 more when each has got ``GROWN`` tokens."""
GROWN = 32
TIGHT = ["--num-gpu-blocks-override", "16", "--max-model-len", "256"]
"""Three or four of ``SHORT`` begin in these blocks, and each wants 2 more for ``GROWN`` tokens:
there are preemptions also where prompts come slowly, one after the other."""

AGGREGATED: dict[str, Any] = {"prefill": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "aggregated": AGGREGATED,
    "aggregated, chunks of 64": {**AGGREGATED, "worker_flags": ["--max-num-batched-tokens", "64"]},
    "aggregated, preempted": {
        **AGGREGATED,
        "worker_flags": ["--num-gpu-blocks-override", "210"],
    },
    "pair": {},
    "pair, chunks of 64, shm": {
        "worker_flags": ["--max-num-batched-tokens", "64", "--kv-connector", "shm"]
    },
    "pair, chunks of 256": {"worker_flags": ["--max-num-batched-tokens", "256"]},
    "pair, blocks of 64": {"worker_flags": ["--block-size", "64"]},
    "pair, preempted": {"worker_flags": ["--num-gpu-blocks-override", "210"]},
    "two of each, chunks of 64, shm": {
        "prefill": 2,
        "decode": 2,
        "worker_flags": ["--max-num-batched-tokens", "64", "--kv-connector", "shm"],
    },
    "three of each": {"prefill": 3, "decode": 3},
}
PULLED = "tandem:kv_handoff_bytes_total"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 16}
Drawn = dict[tuple[str, str], list[list[int]]]
"""Tokens by layout and turn."""


def preemptions(stack: Stack) -> float:
    """Sequences that all workers together have preempted."""
    return sum(stack.total(name, "vllm:num_preemptions_total") for name in stack.workers)


async def check(stack: Stack, indices: tuple[int, ...], count: int = FEW) -> int:
    """Ask for ``count`` tokens of each row's answer and hold them to the judge; how many were
    excused."""
    prompts = [rows()[index].prompt for index in indices]
    answers = await gather(stack.url, prompts, max_tokens=count)
    failed = [answer.error for answer in answers if answer.error]
    assert not failed, failed
    tokens = {index: answer.tokens for index, answer in zip(indices, answers, strict=True)}
    wrong, excused = judge(tokens, count, stack.reference)
    assert not wrong, wrong
    return excused


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    ["aggregated", pytest.param("two of each, chunks of 64, shm", marks=pytest.mark.nightly)],
)
async def test_some_prompts_equal_transformers_and_draws_agree(
    layout: str, start_small: StackMaker, small_pair: Stack
) -> None:
    """The first greedy tokens of a layout and of a pair by NIXL equal transformers', cold and again
    with prefix hits; a seed draws the same tokens in both, and from the prefix cache."""
    drawn: Drawn = {}
    with start_small(**LAYOUTS[layout]) as started:
        for name, stack in (("pair", small_pair), (layout, started)):
            excused = await check(stack, SOME) + await check(stack, SOME, AGAIN)
            decodes = [worker for worker in stack.workers if worker.startswith("decode")]
            pulled = sum(stack.total(worker, PULLED) for worker in decodes)
            assert pulled > 0 or name == "aggregated", name
            print(f"{name}: {excused} excused")
            await draw(stack, name, OTHERS, drawn)
    assert_same(drawn, OTHERS)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.nightly
@pytest.mark.parametrize("prefill", [0, 1])
async def test_preempted_prompts_equal_transformers(prefill: int, start_small: StackMaker) -> None:
    """Sequences that outgrow the blocks give way, come again, and lose or change no token."""
    with start_small(prefill=prefill, worker_flags=TIGHT) as stack:
        await check(stack, SHORT, GROWN)
        assert preemptions(stack) > 0


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_all_prompts_equal_transformers(layout: str, start_stack: StackMaker) -> None:
    """All 64 prompts times 64 tokens, twice, in every layout."""
    with start_stack(**LAYOUTS[layout]) as stack:
        excused = await check(stack, ALL, 64) + await check(stack, ALL, 64)
        print(f"{layout}: {excused} excused of {2 * len(ALL)}")
        assert excused <= 4


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.full
async def test_prefix_hits_on_either_side(start_small: StackMaker) -> None:
    """What P has cached, or half of what D has: the tokens stay transformers'."""
    await hits_on_either_side(start_small, SOME[2:4], LATER)


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_prefix_hits_on_either_side_for_all_prompts(start_stack: StackMaker) -> None:
    """The same over the prompts of every length."""
    await hits_on_either_side(start_stack, ALL, ALL)


async def hits_on_either_side(
    start: StackMaker, indices: tuple[int, ...], halved: tuple[int, ...]
) -> None:
    """Hits on P only (D is new), then on D only (P is new, D had half of each of ``halved``)."""
    with start() as stack:
        await check(stack, indices, AGAIN)
        await renew(stack, "decode-0")
        pulled = Growth(stack, "decode-0", "tandem:kv_handoff_bytes_total")
        found = Growth(stack, "prefill-0", "vllm:prefix_cache_hits_total")
        await check(stack, indices)
        assert pulled.now() > 0
        assert found.now() > 0

        if not set(halved).isdisjoint(indices):
            await renew(stack, "decode-0")
        halves = [rows()[index].prompt for index in halved]
        await gather(stack.url, [half[: len(half) // 2] for half in halves], max_tokens=2)
        await renew(stack, "prefill-0")
        pulled = Growth(stack, "decode-0", "tandem:kv_handoff_bytes_total")
        found = Growth(stack, "decode-0", "vllm:prefix_cache_hits_total")
        await check(stack, halved)
        assert pulled.now() > 0
        assert found.now() > 0


async def renew(stack: Stack, name: str) -> None:
    """Kill a worker and start it again: its cache is empty."""
    stack.signal(name, signal.SIGKILL)
    stack.restart(name)
    await asyncio.to_thread(stack.until, stack.workers[name].check_ready, 60, f"no {name}")
    await asyncio.to_thread(stack.until, lambda: linked(stack), 60, f"{name} is not linked")


def linked(stack: Stack) -> bool:
    pulled = Growth(stack, "decode-0", "tandem:kv_handoff_bytes_total")
    asyncio.run(gather(stack.url, [[time.monotonic_ns() % 40_000] * 32], max_tokens=2))
    return pulled.now() > 0


class Growth:
    """How much a worker's counter has grown since this was made."""

    def __init__(self, stack: Stack, worker: str, metric: str) -> None:
        self.stack, self.worker, self.metric = stack, worker, metric
        self.before = stack.total(worker, metric)

    def now(self) -> float:
        return self.stack.total(self.worker, self.metric) - self.before


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_sampled_tokens_are_the_same_in_all_layouts(start_stack: StackMaker) -> None:
    """A seed draws the same tokens in every layout, of more prompts."""
    drawn: Drawn = {}
    indices = tuple(range(0, 56, 2))
    for layout in LAYOUTS:
        with start_stack(**LAYOUTS[layout]) as stack:
            await draw(stack, layout, indices, drawn)
    assert_same(drawn, indices)


async def draw(stack: Stack, layout: str, indices: tuple[int, ...], drawn: Drawn) -> None:
    """Draw with a seed, cold and again with prefix hits."""
    prompts = [rows()[index].prompt for index in indices]
    for turn in ("cold", "cached"):
        answers = await gather(stack.url, prompts, **SAMPLED)
        drawn[layout, turn] = [answer.tokens for answer in answers]


def assert_same(drawn: Drawn, indices: tuple[int, ...]) -> None:
    first = next(iter(drawn.values()))
    assert all(first)
    differing = {
        key: [index for index, a, b in zip(indices, first, tokens, strict=True) if a != b]
        for key, tokens in drawn.items()
        if tokens != first
    }
    assert not differing
