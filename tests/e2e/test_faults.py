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
from conftest import StackMaker
from reference import rows
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = 52
"""A prompt of about 1,200 tokens: seconds of prefill in chunks of 64."""
DEADLINE = 90.0
FLAGS = {
    "worker_flags": ["--max-num-batched-tokens", "64"],
    "router_flags": ["--request-timeout", str(DEADLINE)],
}
KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


async def struck(
    stack: Stack, index: int, moment: str, worker: str, number: signal.Signals
) -> Answer:
    """A streamed answer during which ``worker`` gets the signal at ``moment``."""
    answer = Answer()
    async with httpx.AsyncClient(base_url=stack.url, timeout=DEADLINE + 30) as client:
        if moment == "before":
            await asyncio.to_thread(stack.signal, worker, number)
        task = asyncio.create_task(collect(client, index, answer))
        if moment == "prefill":
            await asyncio.sleep(1.0)
            assert not answer.tokens, "the prompt is too short for this test"
            await asyncio.to_thread(stack.signal, worker, number)
        elif moment == "decode":
            await asyncio.to_thread(stack.until, lambda: len(answer.tokens) >= 5, 60, "no tokens")
            assert not task.done()
            await asyncio.to_thread(stack.signal, worker, number)
        await task
    return answer


async def collect(client: httpx.AsyncClient, index: int, answer: Answer) -> None:
    """Stream to the end."""
    async for _ in events(client, rows()[index].prompt, answer):
        pass


def hold_to_reference(index: int, answer: Answer) -> None:
    """No error, and right to the last token."""
    assert answer.error is None, answer.error
    assert answer.status == 200
    assert rows()[index].verdict(answer.tokens) in ("equal", "excused")


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize(
    "moment", [pytest.param("before", marks=pytest.mark.full), "prefill", "decode"]
)
async def test_a_killed_worker_costs_no_token(
    moment: str, worker: str, start_stack: StackMaker
) -> None:
    """SIGKILL of P or D, with another decode worker up: the answer is whole and right."""
    with start_stack(decode=2, **FLAGS) as stack:
        started = time.monotonic()
        answer = await struck(stack, LONG, moment, worker, KILL)

        hold_to_reference(LONG, answer)
        assert time.monotonic() - started < DEADLINE


async def test_a_restarted_worker_serves_again(start_stack: StackMaker) -> None:
    """P is killed and started again on the same address: nothing else has to restart."""
    with start_stack(**FLAGS) as stack:
        stack.signal("prefill-0", KILL)
        stack.restart("prefill-0")
        await asyncio.to_thread(stack.until, stack.workers["prefill-0"].check_ready, 60, "no P")
        await asyncio.to_thread(stack.until, lambda: moved(stack), 60, "no KV from the new P")


def moved(stack: Stack) -> bool:
    """One more prompt, and whether its KV came over the hand-off."""
    before = stack.total("decode-0", "tandem:kv_handoff_bytes_total")

    async def ask() -> Answer:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            nobody_has_it = [time.monotonic_ns() % 40_000, *rows()[20].prompt]
            return await stream(client, nobody_has_it, max_tokens=2)

    answer = asyncio.run(ask())
    assert answer.error is None, answer.error
    return stack.total("decode-0", "tandem:kv_handoff_bytes_total") > before


@pytest.mark.full
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("moment", ["before", "prefill", "decode"])
async def test_a_stopped_worker_costs_no_token(
    moment: str, worker: str, start_stack: StackMaker
) -> None:
    """SIGSTOP for 20 s: no hang, no wrong token, and the worker is of use again afterwards."""
    with start_stack(decode=2, **FLAGS) as stack:
        task = asyncio.create_task(struck(stack, LONG, moment, worker, STOP))
        await asyncio.sleep(20)
        stack.signal(worker, CONT)
        answer = await task

        hold_to_reference(LONG, answer)
        await asyncio.to_thread(stack.wait_ready, 30.0)
        again = await asyncio.to_thread(after_fault, stack)
        hold_to_reference(20, again)


def after_fault(stack: Stack) -> Answer:
    """An ordinary request once the fault is over."""

    async def ask() -> Answer:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            return await stream(client, rows()[20].prompt)

    return asyncio.run(ask())
