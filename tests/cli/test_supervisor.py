"""The supervisor's own run: when it gives up, and which signals end it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest

from tandem.cli.serve import up
from tandem.cli.serve.children import Child
from tandem.cli.serve.listening import LOOPBACK, free_ports
from tandem.cli.serve.stack import Graces, UpConfig, _requests, stop
from tandem.cli.serve.up import Supervisor


class Sleeper(Child):
    """A process that serves as soon as it runs."""

    def run(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        words = "import signal; signal.pause()"
        return subprocess.Popen(
            [sys.executable, "-c", words], stdout=subprocess.PIPE, text=True, env=environment
        )

    def check_ready(self) -> bool:
        return self.is_running


class Stack(Supervisor):
    """One such process, of a model that takes an hour to fetch; it stops when it has greeted."""

    now = 0.0
    greeted = False
    ended_by_hangup: bool | None = None
    hangs_up = False

    def __init__(self) -> None:
        (port,) = free_ports(1)
        super().__init__(UpConfig(model="m", port=port, prefill=0))

    def _prepare(self, dummy: bool) -> tuple[str, tuple[str, ...]]:
        self.now += 3600.0
        return "path", ("name",)

    def _plan(self, path: str, names: Sequence[str]) -> list[Child]:
        return [Sleeper("decode-0", ["decode"], "")]

    def _greet(self, name: str) -> None:
        self.greeted = True
        if self.hangs_up:
            signal.raise_signal(signal.SIGHUP)
            self.ended_by_hangup = self._stop.is_set()
        self._stop.set()


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
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


class Stub(Child):
    """No process: it has ended, or runs until it is killed."""

    code: int | None = None
    serves = False
    killed = False

    @property
    def exit_code(self) -> int | None:
        return self.code

    @property
    def is_running(self) -> bool:
        return self.code is None

    def check_ready(self) -> bool:
        if self.serves:
            self.code = 7
        return self.serves

    def kill(self) -> None:
        self.killed = True


def test_who_dies_while_others_start_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stack is not whole any more, however long the others may take."""
    monkeypatch.setattr(up, "POLL_SECONDS", 0.0)
    ready, starting = Stub("decode-0", ["decode"], ""), Stub("router", ["router"], "")
    ready.serves = True
    stack = Stack()
    stack.children = [ready, starting]
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks > 3:
            stack._stop.set()  # else a start that goes on would do so for five minutes
        return False

    monkeypatch.setattr(starting, "check_ready", look)
    assert not stack._wait_ready(time.monotonic())
    assert "decode-0 ended with status 7 while others started" in capsys.readouterr().out


def test_processes_are_killed_whatever_goes_wrong_with_their_end() -> None:
    children = [Stub("decode-0", ["decode"], ""), Stub("router", ["router"], "")]

    def broken() -> bool:
        raise RuntimeError("the terminal is broken")

    with pytest.raises(RuntimeError):
        stop([*children], Graces(1.0, 1.0), hurried=broken, say=print)
    assert all(child.killed for child in children)


def test_an_answer_that_is_torn_is_none() -> None:
    """A worker that ends in the middle of its metrics, or of its word that it is ready."""
    with socket.create_server((LOOPBACK, 0)) as server:
        server.settimeout(10)
        port = server.getsockname()[1]

        def answer(said: bytes) -> None:
            client, _ = server.accept()
            with client:
                client.recv(65_536)
                client.sendall(said)

        child = Child("decode-0", ["decode"], f"http://{LOOPBACK}:{port}/ready")
        for said, ask in (
            (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", _requests),
            (b"nonsense\r\n\r\n", Child.check_ready),
        ):
            thread = threading.Thread(target=answer, args=(said,))
            thread.start()
            assert ask(child) == 0
            thread.join(10)
