"""A node's agent, a producer and a consumer that meet it in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kvtransfer.agent.agents import AgentWorker, Running


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    made = Running(folder)
    yield made
    made.stop()


@pytest.fixture
def producer(folder: Path) -> Iterator[AgentWorker]:
    made = AgentWorker(folder, 7)
    yield made
    made.transport.stop()


@pytest.fixture
def consumer(folder: Path) -> Iterator[AgentWorker]:
    made = AgentWorker(folder, 0)
    made.transport.receive(made.slots, made.blocks)
    yield made
    made.transport.stop()
