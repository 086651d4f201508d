"""cuda_p2p_agent between processes that share a GPU: right bytes, and memory that is let go of."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.kvtransfer.agent.agent_process import SECONDS, Agent
from tests.kvtransfer.builders import FOLDER_VARIABLE, GPU_RANGE, Consumer, make_config
from tests.kvtransfer.test_processes import hand_over, meet
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture
def met(workers, children, monkeypatch):
    """An agent and a producer in processes of their own, and a consumer here, linked."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        monkeypatch.setenv(FOLDER_VARIABLE, name)
        agent = Agent(Path(name))
        child = children("cuda_p2p_agent")
        consumer = workers(
            Consumer, make_config(kv_connector="cuda_p2p_agent", kv_beat_timeout=4.0)
        )
        meet(consumer, child)
        yield agent, child, consumer
        agent.end()


def test_kv_crosses_processes_while_it_is_computed(met):
    """Chunk by chunk, many requests, the right bytes."""
    agent, child, consumer = met
    for number in range(8):
        hand_over(child, consumer, 37 + 10 * number)
    loaded = {"role": "consumer", "outcome": "loaded"}
    consumer.until(lambda: consumer.metric("tandem:kv_handoffs_total", **loaded) == 8)
    assert agent.status()["copies"] > 8


def test_a_killed_producers_memory_is_free_within_two_seconds(met):
    """The driver keeps memory that is mapped anywhere: the agent lets go of it at once."""
    _, child, consumer = met
    hand_over(child, consumer, 100)
    before = torch.cuda.mem_get_info()[0]
    child.signal(signal.SIGKILL)
    started = time.monotonic()
    wait_for(lambda: torch.cuda.mem_get_info()[0] >= before + GPU_RANGE, SECONDS)
    print(f"free after {time.monotonic() - started:.2f} s")


def test_an_agent_that_is_killed_is_followed_by_another(met):
    agent, child, consumer = met
    hand_over(child, consumer, 100)
    agent.end()
    again = Agent(agent.folder)
    wait_for(lambda: again.status()["producers"] == 1, SECONDS)
    consumer.until(lambda: consumer.service.peer_up(child.incarnation))
    hand_over(child, consumer, 100)
    again.end()
