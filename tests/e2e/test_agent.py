"""A stack whose KV an agent copies: tokens of transformers, also while the agent is killed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import StackMaker
from test_tokens import SOME, check
from tests import clear_text
from tests.kvtransfer.agent.agent_process import Agent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short name: that of a socket is bounded."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


def flags(folder: Path, *more: str) -> list[str]:
    """Of workers whose KV an agent copies, chunk by chunk."""
    words = ["--kv-node-folder", str(folder), "--kv-node-copy", "agent", *more]
    return ["--max-num-batched-tokens", "64", *words]


BY_AGENT = '"transport":"shm_agent"'
"""Of a link that is up; one that is not may say why it was, or that it is tried again."""


def fleet(url: str) -> str:
    """What the router says of its workers' links."""
    return clear_text.get(f"{url}/debug/fleet", timeout=10).text


async def test_some_prompts_equal_transformers(folder: Path, start_stack: StackMaker) -> None:
    """All KV goes by the agent, which is named where links are shown."""
    agent = Agent(folder)
    try:
        with start_stack(worker_flags=flags(folder)) as stack:
            excused = await check(stack, SOME) + await check(stack, SOME)
            assert BY_AGENT in fleet(stack.url)
            series = stack.metrics("decode-0")
            moved = stack.total("decode-0", "tandem:kv_handoff_bytes_total")
            assert any("kv_transport_info" in key and "shm_agent" in key for key in series)
            assert agent.status()["bytes"] >= moved > 0
            print(f"{excused} excused")
    finally:
        agent.end()


async def test_a_killed_agent_costs_no_token(folder: Path, start_stack: StackMaker) -> None:
    """Under load: hand-offs under way are tried again, links go another way and come back to the
    next agent."""
    first, agents = Agent(folder), []
    with start_stack(worker_flags=flags(folder, "--kv-quarantine-seconds", "2")) as stack:
        try:
            load = asyncio.create_task(check(stack, SOME))

            def copies() -> bool:
                return first.status().get("copies", 0) > 3

            await asyncio.to_thread(stack.until, copies, 60, "no copies")
            await asyncio.to_thread(first.end)
            await load
            assert BY_AGENT not in fleet(stack.url)
            agents.append(await asyncio.to_thread(Agent, folder))

            def back() -> bool:
                return BY_AGENT in fleet(stack.url)

            await asyncio.to_thread(stack.until, back, 60, "no way back")
            await check(stack, (1, 2, 3))
            assert agents[0].status()["bytes"] > 0
        finally:
            for each in agents:
                each.end()
