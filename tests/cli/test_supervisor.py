"""The supervisor's own run: when it gives up, and which signals end it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace

import pytest

from tandem.cli import up
from tandem.cli.children import Child
from tandem.cli.ports import free_ports
from tandem.cli.up import Supervisor
from tandem.cli.up_config import UpConfig


class Sleeper(Child):
    """A process that serves as soon as it runs."""

    def run(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """One that waits for a signal."""
        words = "import signal; signal.pause()"
        return subprocess.Popen(
            [sys.executable, "-c", words], stdout=subprocess.PIPE, text=True, env=environment
        )

    def check_ready(self) -> bool:
        """At once."""
        return self.is_running


class Stack(Supervisor):
    """One such process, of a model that takes an hour to fetch; it stops when it has greeted."""

    now = 0.0
    greeted = False
    ended_by_hangup: bool | None = None
    hangs_up = False

    def __init__(self) -> None:
        (port,) = free_ports(1)
        super().__init__(UpConfig(model="m", port=port, prefill=0, ready_seconds=300.0))

    def _prepare(self, dummy: bool) -> tuple[str, str]:
        self.now += 3600.0
        return "path", "name"

    def _plan(self, path: str, name: str) -> list[Child]:
        return [Sleeper("decode-0", ["decode"], "")]

    def _greet(self, name: str) -> None:
        self.greeted = True
        if self.hangs_up:
            signal.raise_signal(signal.SIGHUP)
            self.ended_by_hangup = self._stop.is_set()
        self._stop.set()


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As they were, afterwards."""
    before = {number: signal.getsignal(number) for number in (*up.SIGNALS, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_comes_before_the_start_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes longer to fetch than processes may take to start is served."""
    stack = Stack()
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: stack.now))
    assert stack.run() == 0
    assert stack.greeted


@pytest.mark.parametrize("ignored", [True, False])
def test_a_stack_outlives_its_terminal_if_it_was_told_to(ignored: bool) -> None:
    """`nohup tandem up &` starts with the signal ignored; without it the stack stops in order."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    stack = Stack()
    stack.hangs_up = True
    assert stack.run() == 0
    assert stack.ended_by_hangup is not ignored
