"""An agent and two workers in processes that are isolated as pods are: namespaces of their own, of
which the agent's has no network, and a folder that they share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kvtransfer.agent.agent_process import SECONDS, Agent
from tests.kvtransfer.builders import FOLDER_VARIABLE, Consumer, make_config
from tests.kvtransfer.test_processes import hand_over, meet
from tests.waiting import wait_for

from tandem.kvtransfer import events

_APART = ("unshare", "--fork", "--pid", "--mount-proc", "--ipc", "--uts", "--kill-child=KILL")
_MAY = os.getuid() == 0 and not subprocess.call(
    [*_APART, "--net", "true"], stderr=subprocess.DEVNULL
)

pytestmark = [pytest.mark.full, pytest.mark.slow]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, which children are told of, too."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        monkeypatch.setenv(FOLDER_VARIABLE, name)
        yield Path(name)


@pytest.mark.skipif(not _MAY, reason="needs namespaces")
def test_kv_crosses_between_pods(workers, children, place):
    """A producer and the agent in namespaces of their own: right bytes, chunk by chunk; a killed
    producer's memory is let go of, and the agent ends when it is told to."""
    agent = Agent(place, (*_APART, "--net"))
    try:
        child = children("shm_agent", 0, "producer", _APART)
        consumer = workers(Consumer, make_config(kv_connector="shm_agent", kv_beat_timeout=4.0))
        meet(consumer, child)
        for number in range(8):
            hand_over(child, consumer, 37 + 10 * number)
        said = agent.status()
        assert said["copies"] > 8
        assert (said["producers"], said["consumers"], said["garbage"]) == (1, 1, 0)
        child.signal(signal.SIGKILL)
        wait_for(lambda: agent.status()["producers"] == 0, SECONDS)
    finally:
        agent.end()


def test_an_agent_that_is_killed_costs_no_hand_off_but_those_under_way(workers, children, place):
    """The next one serves the same two ends."""
    agent = Agent(place)
    child = children("shm_agent")
    consumer = workers(Consumer, make_config(kv_connector="shm_agent", kv_beat_timeout=4.0))
    meet(consumer, child)
    hand_over(child, consumer)
    assert agent.end() == -signal.SIGKILL
    again = Agent(place)
    wait_for(lambda: again.status()["producers"] == 1, SECONDS)
    try:
        hand_over(child, consumer)
        assert consumer.service.peer_up(child.incarnation)
        assert not [each for each in consumer.seen if isinstance(each, events.LoadFailed)]
    finally:
        assert again.end(signal.SIGTERM) == 0
    assert not (place / "agent.sock").exists()


def test_a_status_without_an_agent_is_an_error(place):
    words = [sys.executable, "-m", "tandem.cli", "node-agent", "--kv-node-folder", str(place)]
    said = subprocess.run([*words, "--status"], check=False, capture_output=True, timeout=SECONDS)
    assert said.returncode == 1
    assert b"no agent of this node" in said.stderr
