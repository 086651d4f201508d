"""A process that is forked for a test is what a started one is."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from tests.forked import Forked, fork_server, forked

from tandem.cli.children import Child
from tandem.cli.ports import LOOPBACK, free_ports
from tandem.cli.stack import router_child


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TextIO]:
    """Where output goes."""
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


def test_its_exit_status_and_last_line_are_told(log: TextIO) -> None:
    """Of settings that are wrong."""
    child = forked(Child("router", ["router", "--no-such-flag"], ""))
    child.start(log)
    assert child.process is not None
    assert child.process.wait(60) == 2
    child.join_output()
    log.seek(0)
    assert "--no-such-flag is no flag" in log.read()


def test_what_libraries_read_at_their_import_has_it_started(log: TextIO) -> None:
    """A number of threads is read once; a setting of our own when it runs."""
    child = forked(Child("router", ["router", "--no-such-flag"], ""))
    child.environment = {"OMP_NUM_THREADS": "1"}
    child.start(log)
    assert isinstance(child.process, subprocess.Popen)
    assert child.process.wait(60) == 2
