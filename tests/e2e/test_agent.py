"""A stack whose KV an agent copies: tokens of transformers, also while the agent is killed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Stack
from test_tokens import AGAIN, SOME, check
from tests import clear_text
from tests.kvtransfer.agent.agent_process import Agent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OTHERS = (1, 10, 19, 27, 30, 34)
"""Rows that share no block with ``SOME``."""
BY_AGENT = '"transport":"shm_agent"'
"""Of a link that is up; one that is not may say why it was, or that it is tried again."""


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """Of a folder with a short name: that of a socket is bounded. The last test kills it."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        agent = Agent(Path(name))
        try:
            yield agent
        finally:
            agent.end()


@pytest.fixture(scope="module")
def stack(agent: Agent, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pair whose KV the agent copies, chunk by chunk."""
    words = ["--kv-node-folder", str(agent.folder), "--kv-node-copy", "agent"]
    words += ["--max-num-batched-tokens", "64"]
    log = tmp_path_factory.mktemp("agent") / "stack.log"
    with Stack.running(str(smollm2), log, worker_flags=words) as stack:
        yield stack


def fleet(url: str) -> str:
    return clear_text.get(f"{url}/debug/fleet", timeout=10).text


@pytest.mark.nightly
async def test_some_prompts_equal_transformers(agent: Agent, stack: Stack) -> None:
    """All KV goes by the agent, which is named where links are shown."""
    excused = await check(stack, SOME) + await check(stack, SOME, AGAIN)
    assert BY_AGENT in fleet(stack.url)
    series = stack.metrics("decode-0")
    moved = stack.total("decode-0", "tandem:kv_handoff_bytes_total")
    assert any("kv_transport_info" in key and "shm_agent" in key for key in series)
    assert agent.status()["bytes"] >= moved > 0
    print(f"{excused} excused")


@pytest.mark.nightly
async def test_a_killed_agent_costs_no_token(agent: Agent, stack: Stack) -> None:
    """Under load: hand-offs under way are tried again, links go another way and come back to the
    next agent. One is under way: P holds its blocks for D, and some parts of it are copied."""
    before = agent.status()["copies"]
    load = asyncio.create_task(check(stack, OTHERS))

    def copies() -> bool:
        leased = stack.total("prefill-0", "tandem:kv_leased_blocks") > 0
        return leased and agent.status()["copies"] > before + 3

    await asyncio.to_thread(stack.until, copies, 60, "no copies")
    assert not load.done()
    await asyncio.to_thread(agent.end)
    await load
    # Workers tell the router of their links a beat later, and some answers are shorter than that.
    gone = lambda: BY_AGENT not in fleet(stack.url)  # noqa: E731
    await asyncio.to_thread(stack.until, gone, 60, "the links go by a dead agent")
    following = await asyncio.to_thread(Agent, agent.folder)
    try:
        await asyncio.to_thread(
            stack.until, lambda: BY_AGENT in fleet(stack.url), 90, "no way back"
        )
        await check(stack, (2, 3, 4))
        assert following.status()["bytes"] > 0
    finally:
        following.end()
