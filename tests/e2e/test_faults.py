"""Workers that die, hang or come back: every answer comes whole, right and in time.

Each fault strikes at a chosen moment of a streamed request; the answer is held to the reference.
"""

from __future__ import annotations

import asyncio
import signal
import time

import httpx
import pytest
from client import Answer, events, stream
from conftest import DEADLINE, StackMaker
from reference import rows
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = 52
"""A prompt of about 1,200 tokens: seconds of prefill in chunks of 64."""
OWN = {
    ("before", "prefill"): 38,
    ("before", "decode"): 37,
    ("prefill", "prefill"): 62,
    ("prefill", "decode"): 61,
    ("decode", "prefill"): 36,
    ("decode", "decode"): 35,
}
"""A prompt for each, so that none is in a cache: of over 2,500 tokens where prefill is struck."""
COUNT = 48
"""Tokens of an answer."""
MANY = 512
"""Tokens of one that is under way when a worker is hurt after the fifth."""
FLAGS = {
    "worker_flags": ["--max-num-batched-tokens", "64"],
    "router_flags": ["--request-timeout", str(DEADLINE)],
}
KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


async def struck(
    stack: Stack, index: int, moment: str, role: str, number: signal.Signals, count: int = COUNT
) -> Answer:
    """A streamed answer during which a worker of ``role`` gets the signal at ``moment``: the one
    that has the request, and the first one before there is one."""
    answer = Answer()
    async with httpx.AsyncClient(base_url=stack.url, timeout=DEADLINE + 30) as client:
        if moment == "before":
            await asyncio.to_thread(stack.signal, f"{role}-0", number)
        task = asyncio.create_task(collect(client, index, answer, count))
        if moment == "prefill":
            worker = await asyncio.to_thread(stack.holder, role)
            assert not answer.tokens, "the prompt is too short for this test"
            await asyncio.to_thread(stack.signal, worker, number)
        elif moment == "decode":
            await asyncio.to_thread(stack.until, lambda: len(answer.tokens) >= 5, 60, "no tokens")
            # P may be through with it: it is hurt all the same.
            worker = (
                "prefill-0" if role == "prefill" else await asyncio.to_thread(stack.holder, role)
            )
            assert not task.done()
            await asyncio.to_thread(stack.signal, worker, number)
        await task
    return answer


async def collect(client: httpx.AsyncClient, index: int, answer: Answer, count: int) -> None:
    async for _ in events(client, rows()[index].prompt, answer, max_tokens=count):
        pass


def hold_to_reference(stack: Stack, index: int, answer: Answer, count: int = COUNT) -> None:
    """No error, and right to the last token."""
    assert answer.error is None, answer.error
    assert answer.status == 200
    assert rows(stack.reference)[index].cut(count).verdict(answer.tokens) in ("equal", "excused")


@pytest.mark.parametrize(
    ("moment", "role"),
    [
        ("prefill", "prefill"),
        pytest.param("decode", "decode", marks=pytest.mark.full),
        pytest.param("before", "prefill", marks=pytest.mark.nightly),
        pytest.param("before", "decode", marks=pytest.mark.nightly),
        pytest.param("prefill", "decode", marks=pytest.mark.nightly),
        pytest.param("decode", "prefill", marks=pytest.mark.nightly),
    ],
)
async def test_a_killed_worker_costs_no_token(moment: str, role: str, hurt: Stack) -> None:
    """SIGKILL of P or D, with another decode worker up: the answer is whole and right."""
    started, prompt = time.monotonic(), OWN[moment, role]
    count = MANY if moment == "decode" else COUNT
    answer = await struck(hurt, prompt, moment, role, KILL, count)

    hold_to_reference(hurt, prompt, answer, count)
    assert time.monotonic() - started < DEADLINE


@pytest.mark.full
async def test_a_restarted_worker_serves_again(hurt: Stack) -> None:
    """P is killed and started again on the same address: nothing else has to restart."""
    hurt.signal("prefill-0", KILL)
    hurt.restart("prefill-0")
    await asyncio.to_thread(hurt.until, hurt.workers["prefill-0"].check_ready, 60, "no P")
    await asyncio.to_thread(hurt.until, lambda: moved(hurt), 60, "no KV from the new P")


def pulled(stack: Stack) -> float:
    """Bytes of KV that decode workers have taken over."""
    decodes = [name for name in stack.workers if name.startswith("decode")]
    return sum(stack.total(name, "tandem:kv_handoff_bytes_total") for name in decodes)


def moved(stack: Stack) -> bool:
    """One more prompt, and whether its KV came over the hand-off."""
    before = pulled(stack)

    async def ask() -> Answer:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            nobody_has_it = [time.monotonic_ns() % 40_000, *rows()[20].prompt]
            return await stream(client, nobody_has_it, max_tokens=2)

    answer = asyncio.run(ask())
    assert answer.error is None, answer.error
    return pulled(stack) > before


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["before", "prefill", "decode"])
async def test_a_stopped_worker_costs_no_token(
    moment: str, role: str, start_stack: StackMaker
) -> None:
    """SIGSTOP for 20 s: no hang, no wrong token, and the worker is of use again afterwards."""
    with start_stack(decode=2, **FLAGS) as stack:
        task = asyncio.create_task(struck(stack, LONG, moment, role, STOP))
        await asyncio.sleep(20)
        for worker in stack.workers:
            stack.signal(worker, CONT)
        answer = await task

        hold_to_reference(stack, LONG, answer)
        await asyncio.to_thread(stack.wait_ready, 30.0)
        again = await asyncio.to_thread(after_fault, stack)
        hold_to_reference(stack, 20, again)


def after_fault(stack: Stack) -> Answer:
    """An ordinary request once the fault is over."""

    async def ask() -> Answer:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            return await stream(client, rows()[20].prompt, max_tokens=COUNT)

    return asyncio.run(ask())
