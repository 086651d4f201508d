"""Prefixes pulled between real workers, over links that the router told them of."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from client import Answer, body_of, events, stream
from conftest import StackMaker
from reference import rows
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FIRSTS, SECOND = (36, 38, 40), 37
"""Prompts of 318 to 444 tokens: a second or so to compute, milliseconds to pull. A machine that
stands still for as long as it would compute gives the pull up, rightly, and has another try."""
WARMING = 3, 6
"""Short ones, with answers of the same length."""
COUNT = 40
"""Tokens of an answer at least: its seat is kept for longer than a pull takes."""
FLAGS = {
    "prefill": 0,
    "decode": 2,
    "worker_flags": ["--kv-pull-peers", "1", "--max-num-seqs", "1", "--kv-connector", "shm"],
    "router_flags": [
        "--no-strict-handoff",
        "--target-ttft-ms",
        "60000",
        "--target-itl-ms",
        "5000",
    ],
}
PULLS = "tandem:kv_prefix_pulls_total"
FALLBACKS = "tandem:kv_prefix_pull_fallbacks_total"
COUNTED = PULLS, "tandem:kv_prefix_pulled_tokens_total", FALLBACKS
LATE = FALLBACKS + '{reason="timeout"}'
RUNNING = "vllm:num_requests_running"
SECONDS = 100
"""Of each wait at most: links are probed again that were probed first while all started."""
LEAST = 30e6
"""Bytes a second by which a prompt's 15 MB come sooner than a busy core computes them."""
BLOCK = 16
"""Tokens."""
BEATS_SECONDS = 1.0
"""Two beats of a worker."""


@pytest.mark.nightly
async def test_a_prefix_is_pulled_from_a_full_peer_and_a_killed_peer_costs_time_alone(
    start_stack: StackMaker,
) -> None:
    """Twice: a worker that computed a prompt answers still, in its only seat, so the next of that
    prompt goes to the other one, which pulls it; then the same with the holder stopped, asked, and
    killed. Every answer is the reference's."""
    with start_stack(**FLAGS) as stack:
        await _until(stack, lambda: _linked(stack), "no links that are worth a pull")
        async with httpx.AsyncClient(base_url=stack.url, timeout=180) as client:
            await _warm(stack, client)
            cached, pulls, tokens, fallbacks = await _first_pull(stack, client)
            assert cached >= 304, _seen(stack)
            assert pulls == 1, _seen(stack)
            assert tokens >= 304
            assert fallbacks == 0

            holder, other, seated, leave = await seat(stack, client, SECOND)
            before = [stack.total(other, each) for each in COUNTED]
            stack.signal(holder, signal.SIGSTOP)
            pulling = asyncio.create_task(stream(client, rows()[SECOND].prompt, max_tokens=COUNT))
            await _until(stack, lambda: _is_there(stack, other), "it went nowhere")
            stack.signal(holder, signal.SIGKILL)
            leave.set()
            _hold(SECOND, [await pulling, await seated])
            assert stack.total(other, PULLS) == before[0]
            assert stack.total(other, FALLBACKS) == before[2] + 1, _seen(stack)


async def _first_pull(stack: Stack, client: httpx.AsyncClient) -> tuple[float, ...]:
    """Of a prompt whose holder is full: how much of it was cached, and by how much the other
    worker's counters have grown."""
    for index in FIRSTS:
        _, other, seated, leave = await seat(stack, client, index)
        before = [stack.total(other, each) for each in COUNTED]
        assert not any(before) or index != FIRSTS[0], _seen(stack)
        late = stack.metrics(other)[LATE]
        usage = await _usage(client, index)
        gained = [stack.total(other, each) for each in COUNTED]
        given_up = stack.metrics(other)[LATE] > late
        leave.set()
        _hold(index, [await seated])
        if not given_up:
            grown = (now - then for now, then in zip(gained, before, strict=True))
            return usage["prompt_tokens_details"]["cached_tokens"], *grown
    raise AssertionError(f"each pull was given up: {_seen(stack)}")


async def seat(
    stack: Stack, client: httpx.AsyncClient, index: int
) -> tuple[str, str, asyncio.Task[Answer], asyncio.Event]:
    """An answer under way to a prompt that no cache has, in the only seat of the worker that
    computed it: that one, the other worker, the answer, and when it may end. Nothing is asked of
    where a prompt is placed that is cached already: who has computed is taken for busy a while,
    so that one that is idle may be sent it though that pulls."""
    # Until a beat says so, routers take a seat for taken; one that was late says so once more.
    await _until(stack, lambda: _rests(stack), "somebody runs still")
    since = time.monotonic() + BEATS_SECONDS
    await _until(stack, lambda: _idle(stack, since), "nobody beats")
    known = _fleet(stack)["indexed_blocks"]
    leave = asyncio.Event()
    seated = asyncio.create_task(_long(client, index, leave))
    await _until(stack, lambda: bool(_running(stack)), "the seat is free")
    (holder,) = _running(stack)
    (other,) = [name for name in stack.workers if name != holder]
    least = known + len(rows()[index].prompt) // BLOCK
    await _until(stack, lambda: _fleet(stack)["indexed_blocks"] >= least, "nothing is cached")
    return holder, other, seated, leave


async def _warm(stack: Stack, client: httpx.AsyncClient) -> None:
    """An answer of each worker: from then on routers know what steps take and how long a seat is
    kept, which is longer than a pull takes."""
    prompts = [rows()[index].prompt for index in WARMING]
    await asyncio.gather(*(stream(client, each, max_tokens=COUNT) for each in prompts))
    served = [stack.total(name, "vllm:generation_tokens_total") for name in stack.workers]
    assert min(served) > 0, _seen(stack)


async def _until(stack: Stack, check: Callable[[], bool], problem: str) -> None:
    try:
        await asyncio.to_thread(stack.until, check, SECONDS, problem)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{_seen(stack)}") from error


async def _long(client: httpx.AsyncClient, index: int, leave: asyncio.Event) -> Answer:
    """An answer that keeps its seat until it may leave: of which the reference has the start."""
    answer = Answer()
    async for _ in events(client, rows()[index].prompt, answer, max_tokens=900):
        if leave.is_set() and len(answer.tokens) >= COUNT:
            break
    answer.tokens = answer.tokens[:COUNT]
    return answer


def _hold(index: int, answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.error is None, answer.error
        assert rows()[index].cut(COUNT).verdict(answer.tokens) in ("equal", "excused")


def _linked(stack: Stack) -> bool:
    """Whether each can pull from the other one, and soon."""
    links = _fleet(stack)["pull_links"]
    return len(links) == 2 and min(each["bytes_per_s"] for each in links) >= LEAST


def _running(stack: Stack) -> list[str]:
    return [name for name in stack.workers if stack.total(name, RUNNING)]


def _rests(stack: Stack) -> bool:
    return not _running(stack)


def _idle(stack: Stack, since: float) -> bool:
    """Whether the router has heard, since then, that nobody has anything to do."""
    workers, now = _fleet(stack)["workers"], time.monotonic()
    heard = [now - each["heard_ms_ago"] / 1000 for each in workers]
    busy = [each for each in workers if each["running"] or each["waiting"] or each["legs"]]
    return min(heard) > since and not busy


def _fleet(stack: Stack) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.url}/debug/fleet", timeout=5) as answer:
        fleet: dict[str, Any] = json.load(answer)
    return fleet


def _seen(stack: Stack) -> str:
    """What the router weighed and workers counted, for who reads a failure."""
    with urllib.request.urlopen(f"{stack.url}/debug/placements", timeout=5) as answer:
        weighed = [json.dumps(each) for each in json.load(answer)["placements"]]
    counted = [stack.metrics(name).items() for name in stack.workers if name not in stack.killed]
    some = [f"{name} {value}" for each in counted for name, value in each if "prefix_" in name]
    return "\n".join([*weighed, *(each for each in some if not each.endswith(" 0.0"))])


def _is_there(stack: Stack, name: str) -> bool:
    return stack.total(name, RUNNING) + stack.total(name, "vllm:num_requests_waiting") >= 1


async def _usage(client: httpx.AsyncClient, index: int) -> dict[str, Any]:
    """Of a prompt's answer. It is as long as others: a worker whose answers are short is expected
    to have a seat soon, and would be sent what it holds, seat or not."""
    body = body_of(rows()[index].prompt, max_tokens=COUNT)
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage
