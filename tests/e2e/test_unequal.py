"""Prefill and decode workers whose blocks differ in size, or whose KV travels as fp8."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from typing import Any

import pytest
from client import gather
from conftest import StackMaker
from reference import rows
from stack import Stack
from test_tokens import AGAIN, FEW, LATER, SOME, Growth, check, linked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STRUCK = SOME[4:]
"""A row of 248 tokens, for whose KV D waits when P is killed."""
HALVED = LATER[:1]
"""One of 164, whose half is more than a block of 64."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "16 and 64": {
        "prefill_flags": ["--block-size", "16"],
        "decode_flags": ["--block-size", "64"],
    },
    "64 and 16, shm": {
        "worker_flags": ["--kv-connector", "shm"],
        "prefill_flags": ["--block-size", "64"],
        "decode_flags": ["--block-size", "16"],
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_tokens_equal_transformers(layout: str, start_small: StackMaker) -> None:
    """Cold; with hits on both ends; while P is killed; with hits on D alone, of D's block size."""
    with start_small(**LAYOUTS[layout]) as stack:
        taken = Growth(stack, "decode-0", "tandem:kv_handoff_bytes_total")
        await check(stack, SOME[:4])
        await check(stack, SOME[:4], AGAIN)
        assert taken.now() > 0
        assert_hits_are_of_own_blocks(stack)

        stack.signal("prefill-0", signal.SIGSTOP)  # else it may be through before it is killed
        asked = asyncio.create_task(check(stack, STRUCK))
        await asyncio.to_thread(stack.holder, "decode")
        assert not asked.done()
        stack.signal("prefill-0", signal.SIGKILL)
        await asked
        halves = [rows()[index].prompt for index in HALVED]
        await gather(stack.url, [half[: len(half) // 2] for half in halves], max_tokens=2)
        await renew_killed(stack)
        found = Growth(stack, "decode-0", "vllm:prefix_cache_hits_total")
        taken = Growth(stack, "decode-0", "tandem:kv_handoff_bytes_total")
        await check(stack, HALVED)
        assert found.now() > 0
        assert taken.now() > 0


async def renew_killed(stack: Stack) -> None:
    """P begins anew, and has nothing in its cache."""
    stack.restart("prefill-0")
    ready = stack.workers["prefill-0"].check_ready
    await asyncio.to_thread(stack.until, ready, 60, "prefill-0 is not ready")
    await asyncio.to_thread(stack.until, lambda: linked(stack), 60, "prefill-0 is not linked")


def assert_hits_are_of_own_blocks(stack: Stack) -> None:
    """The router counts what each worker has cached by that worker's own hashes and sizes."""
    with urllib.request.urlopen(f"{stack.url}/debug/fleet", timeout=5) as answer:
        fleet = json.load(answer)
    sizes = {worker["role"]: worker["block_size"] for worker in fleet["workers"]}
    assert sorted(sizes.values()) == [16, 64]
    assert len({worker["fingerprint"] for worker in fleet["workers"]}) == 2
    assert len({worker["compatibility"] for worker in fleet["workers"]}) == 1


@pytest.mark.nightly
async def test_kv_travels_as_fp8_and_answers_are_much_the_same(start_stack: StackMaker) -> None:
    """One end asks for it: about a quarter of the bytes of float32. Answers part sooner or later
    (bench/results/wire_dtype_cpu.md); what is wrong would part at the second token."""
    prompts = [rows()[index].prompt for index in SOME]
    with start_stack(decode_flags=["--kv-wire-dtype", "fp8"]) as stack:
        taken = Growth(stack, "decode-0", "tandem:kv_handoff_bytes_total")
        answers = await gather(stack.url, prompts, max_tokens=2 * FEW)
        num_tokens = sum(map(len, prompts))
        raw = num_tokens * 30 * 2 * 3 * 64 * 4
        assert 0 < taken.now() < 0.35 * raw
    assert not any(answer.error for answer in answers)
    pairs = [
        pair
        for index, answer in zip(SOME, answers, strict=False)
        for pair in zip(answer.tokens, rows()[index].tokens[: 2 * FEW], strict=True)
    ]
    assert sum(ours == theirs for ours, theirs in pairs) > 0.2 * len(pairs)
