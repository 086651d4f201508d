"""Two smoke tests of what tests are made with: forked processes and ports of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest
from tests.forked import Forked, fork_server, forked
from tests.own_ports import own_ports

from tandem.cli.serve.children import Child
from tandem.cli.serve.listening import LOOPBACK, free_ports
from tandem.cli.serve.stack import router_child

ROOT = Path(__file__).parents[1]
PRINTS = "from tests.own_ports import own_ports; print(*own_ports(40), flush=True); input()"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "log").open("w+") as log:
        yield log


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was when the server began: libraries of other tests set variables of their own."""
    began = fork_server("router").environment
    for name in set(os.environ) - set(began):
        monkeypatch.delenv(name)
    for name, value in began.items():
        monkeypatch.setenv(name, value)


def router(model: Path) -> Child:
    """One that would wait for its workers for ever."""
    port, worker = free_ports(2)
    return forked(router_child(str(model), LOOPBACK, port, [worker], []))


def test_it_is_a_child_and_leads_a_session_and_ends_by_a_signal(smollm2: Path, log: TextIO) -> None:
    """What runs is the command, with its own variables, its output in the log."""
    child = router(smollm2)
    child.start(log)
    process = child.process
    assert isinstance(process, Forked)
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        assert [int(stat[1]), int(stat[3])] == [os.getpid(), process.pid]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert child.is_running
    finally:
        child.signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL == child.exit_code
    child.kill()  # of what has ended: nothing


def test_ports_of_several_processes_differ() -> None:
    """A port is free for seconds between its choice and its use."""
    found = [own_ports(40)]
    with ExitStack() as running:
        for _ in range(2):
            words = [sys.executable, "-c", PRINTS]
            process = running.enter_context(
                subprocess.Popen(words, cwd=ROOT, stdin=-1, stdout=-1, text=True)
            )
            running.callback(process.kill)
            assert process.stdout is not None
            found.append([int(each) for each in process.stdout.readline().split()])
    assert [len(each) for each in found] == [40] * 3
    assert len(set().union(*found)) == 120
