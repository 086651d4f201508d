"""Commands as the first process of a container, which gets no signal that it has no handler for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.waiting import wait_for

ALONE = ["unshare", "--pid", "--fork", "--kill-child"]
END_SECONDS = 60.0
"""Of what takes a busy machine long, or never comes."""
START_SECONDS = 12.0
TERM = 1 << (signal.SIGTERM - 1)


def is_possible() -> bool:
    """Whether this user may make a process the first of a namespace."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, timeout=30).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_possible(), reason="no process namespaces here"),
]


class First:
    """A command that is the first process, seen from outside."""

    def __init__(self, outer: subprocess.Popen[bytes], pid: int) -> None:
        self.outer = outer
        self.pid = pid

    def heeds(self) -> bool:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) & TERM)
        return False

    def until_it_heeds(self) -> None:
        """The interpreter has begun to run Tandem."""
        wait_for(self.heeds, END_SECONDS, every=0.0, seen=lambda: "no handler of SIGTERM")

    def terminated(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.outer.wait(timeout=END_SECONDS)


@contextmanager
def first_process(command: list[str], log: Path) -> Iterator[First]:
    """Run a command as process 1 of a namespace."""
    with log.open("wb") as out:
        outer = subprocess.Popen([*ALONE, *command], stdout=out, stderr=out)
    try:
        yield First(outer, inner_pid(outer.pid, command[0]))
    finally:
        outer.kill()
        outer.wait()


def inner_pid(outer: int, program: str) -> int:
    """The process in the namespace, once it runs the program."""
    children = Path(f"/proc/{outer}/task/{outer}/children")
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        for pid in children.read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(program.encode()):
                return int(pid)
    raise AssertionError("the process did not begin")


def commands(model: Path) -> dict[str, list[str]]:
    """What pods run, as far as it comes without a cluster."""
    worker = ["--model", str(model), "--device", "cpu", "--port", "0", "--probe-port", "0"]
    return {
        "operator": ["operator", "--port", "0"],
        "router": ["router", "--model", str(model), "--workers", "127.0.0.1:9", "--port", "0"],
        "prefill": ["prefill", *worker],
        "decode": ["decode", *worker],
    }


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server that nobody answers for: the operator waits for its Lease."""
    text = (
        "{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {}}], "
        "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:9'}}], "
        "contexts: [{name: c, context: {cluster: k, user: u}}]}"
    )
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))


def test_sigterm_is_heeded_before_anything_is_imported():
    """Importing the entry point is enough: nothing of Tandem is loaded without a handler."""
    code = (
        "import signal, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('tandem.') and not name.startswith('tandem.cli'):\n"
        "            print(name, signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from tandem.cli.__main__ import main\n"
        "print('main', signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)\n"
        "main(['--version'])\n"
    )
    done = subprocess.run(
        [*ALONE, sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    seen = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert "main True" in seen, done.stderr
    assert all(line.endswith("True") for line in seen)


@pytest.mark.parametrize("name", ["operator", "router", "prefill", "decode"])
def test_a_command_ends_at_sigterm_from_its_first_moment(
    smollm2: Path, tmp_path: Path, kubeconfig: None, name: str
):
    """A pod that is deleted at once is gone at once."""
    command = [sys.executable, "-m", "tandem.cli", *commands(smollm2)[name]]
    with first_process(command, tmp_path / "log") as first:
        first.until_it_heeds()
        assert first.terminated() == 128 + signal.SIGTERM


@pytest.mark.nightly
def test_no_moment_of_a_start_is_deaf(smollm2: Path, tmp_path: Path, kubeconfig: None):
    """From the first handler to the command's own there is always one, and the end is in order. All
    commands at once: each is looked at for as long as the slowest may take to start."""
    with ExitStack() as stack:
        running = {}
        for name, words in commands(smollm2).items():
            command = [sys.executable, "-m", "tandem.cli", *words]
            first = stack.enter_context(first_process(command, tmp_path / name))
            first.until_it_heeds()
            running[name] = first
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            for name, first in running.items():
                assert first.outer.poll() is None, (tmp_path / name).read_text()
                assert first.heeds(), name
            time.sleep(0.002)
        for name, first in running.items():
            assert first.terminated() in (0, 128 + signal.SIGTERM), (tmp_path / name).read_text()
