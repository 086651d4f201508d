"""An agent's series: its own numbers, over HTTP where a port is given, and nowhere else."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from tests.kvtransfer.agent.agent_process import SECONDS, Agent
from tests.kvtransfer.agent.agents import AgentWorker, Held, Running
from tests.kvtransfer.agent.test_agent import begun, linked, moved, read
from tests.kvtransfer.mapped.test_mapped import block, ended, until
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES

from tandem.cli.serve.listening import free_ports
from tandem.kvtransfer.nodeagent import server
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig
from tandem.kvtransfer.nodeagent.run import AgentSeries
from tandem.kvtransfer.transports.agent.wire import Fault
from tandem.kvtransfer.transports.base import Progress
from tandem.protocol.errors import InvalidParameter


class Shown:
    def __init__(self, running: Running) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(AgentSeries(running.agent.status))

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"tandem:kv_agent_{name}", labels)


def test_series_count_what_the_agent_does(
    running: Running, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """Copies and bytes, refusals, garbage, and who is registered; each begins at 0."""
    shown = Shown(running)
    assert shown("copies_total") == shown("callers_lost_total", reason="stranger") == 0
    assert {shown("refused_total", reason=fault.name.lower()) for fault in Fault} == {0}
    assert shown("workers", role="producer") == 0
    peer = linked(consumer, producer)
    assert read(consumer, peer, block(0, 1), block(2, 3), block(4, 5)) is Progress.DONE
    assert shown("copied_bytes_total") == 3 * BYTES
    assert shown("copies_total") == running.agent.counts["copies"] == 2, "two blocks a slot"
    assert shown("workers", role="producer") == shown("workers", role="consumer") == 1
    assert read(consumer, peer, block(0, BLOCKS)) is Progress.FAILED
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
        rude.connect(str(running.agent.path))
        rude.send(b"no message")
        until(lambda: shown("callers_lost_total", reason="garbage") == 1)
    producer.transport.stop()
    until(lambda: shown("workers", role="producer") == 0)
    assert shown("copies_total") == 2, "counters stay"


def test_a_request_without_an_answer_is_pending(
    folder: Path, monkeypatch: pytest.MonkeyPatch, consumer: AgentWorker, producer: AgentWorker
) -> None:
    """Under way as far as the agent has begun, else waiting; and a caller that goes takes its own
    along."""
    monkeypatch.setattr(server, "MAX_RUNNING", 1)
    held = Held(monkeypatch)
    running = Running(folder)
    shown = Shown(running)
    peer = linked(consumer, producer)
    ticket = consumer.transport.read(peer, [block(number, number) for number in range(6)])
    begun(consumer, held, 1)
    until(lambda: moved(consumer) and shown("copies_pending", state="waiting") == 2)
    assert shown("copies_pending", state="under_way") == 1
    held.through = True
    assert ended(consumer.transport, ticket) is Progress.DONE
    assert shown("copies_pending", state="waiting") == 0
    held.through = False
    consumer.transport.read(peer, [block(number, number) for number in range(6)])
    until(lambda: moved(consumer) and shown("copies_pending", state="waiting") == 2)
    consumer.transport.stop()
    until(lambda: shown("copies_pending", state="waiting") == 0)
    held.through = True
    until(lambda: shown("copies_pending", state="under_way") == 0)
    running.stop()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_shows_them_at_its_port(folder: Path) -> None:
    """And what `--status` prints at /debug; a port that is taken ends it with the words."""
    (port,) = free_ports(1)
    agent = Agent(folder, flags=("--probe-port", str(port)))
    try:
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
            text = answer.read().decode()
        assert "tandem:kv_agent_copies_total 0.0" in text
        assert 'tandem:kv_agent_workers{role="producer"} 0.0' in text
        with urllib.request.urlopen(f"{url}/debug", timeout=SECONDS) as answer:
            assert json.load(answer) == agent.printed() == agent.status()
        with urllib.request.urlopen(f"{url}/health", timeout=SECONDS) as answer:
            assert answer.status == 200
        words = ["node-agent", "--kv-node-folder", str(folder / "other"), "--probe-port", str(port)]
        (folder / "other").mkdir()
        said = subprocess.run(
            [sys.executable, "-m", "tandem.cli", *words],
            check=False,
            capture_output=True,
            timeout=SECONDS,
        )
        assert said.returncode == 1
        assert f"127.0.0.1:{port}".encode() in said.stderr
    finally:
        assert agent.end(signal.SIGTERM) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), SECONDS)


@pytest.mark.full
@pytest.mark.slow
def test_without_a_port_an_agent_listens_at_no_network(folder: Path) -> None:
    """The kernel's own list of sockets has none of it."""
    agent = Agent(folder)
    try:
        process = Path("/proc", str(agent.process.pid))
        mine = set()
        for each in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # one that it has closed since they were listed
                mine.add(str(each.readlink()).removeprefix("socket:[").removesuffix("]"))
        assert mine
        of_networks = {
            line.split()[9]
            for table in ("tcp", "tcp6")
            for line in (process / "net" / table).read_text().splitlines()[1:]
        }
        assert not mine & of_networks
    finally:
        agent.end()


@pytest.mark.parametrize("port", [-1, 65536, True, "80"])
def test_a_port_that_is_none_is_refused(port: object) -> None:
    with pytest.raises(InvalidParameter, match="probe_port"):
        NodeAgentConfig(probe_port=port)  # type: ignore[arg-type]
