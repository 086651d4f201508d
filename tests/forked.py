"""Workers, routers and ranks that are forked instead of started: most of what a start costs is
imports, which all have in common.

A forked process is a child of this process and the leader of a session, as a started one is. What
starts them as everybody does are the tests of `tandem up`, of the clusters and of single commands,
and stacks that are told not to fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, cast

from tandem.cli.serve.children import Child
from tandem.protocol.names import ENV_PREFIX

_PR_SET_CHILD_SUBREAPER = 36
_REPOSITORY = Path(__file__).parent.parent
_OWN = (ENV_PREFIX, "PYTEST_CURRENT_TEST", "UCX_", "OTEL_")
"""How variables begin that a worker reads when it runs, and no library at its import."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Threads of OpenMP spin, which on a busy machine takes for ever."""
IMPORTED_WITH = {"rank": ONE_THREAD, "handoff": ONE_THREAD}
"""Variables of processes that fork, beside this one's."""


class Forked:
    """What ``subprocess.Popen`` is of a started process."""

    def __init__(self, pid: int, stdout: IO[str] | None, stdin: IO[str] | None = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status, the negated number of a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same at its end. Raises TimeoutExpired."""
        with self._lock:  # its number is its own as long as nobody has waited for it
            handle = os.pidfd_open(self.pid) if self.returncode is None else None
        if handle is not None:
            try:
                ended = select.poll()
                ended.register(handle, select.POLLIN)
                ended.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(handle)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks, and this end of its socket."""

    def __init__(self, what: str, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), what],
                stdin=subprocess.DEVNULL,
                cwd=_REPOSITORY,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        *,
        talks: bool = False,
        output: int | None = None,
        beside: Sequence[int] = (),
        ahead: float = 0.0,
    ) -> Forked:
        """A process. While it is made, this one is the parent of its descendants' orphans. With
        ``talks`` its standard input is a pipe, too, and what it says of errors goes nowhere.
        ``output`` takes what it says in place of a pipe. Descriptors ``beside`` are its own as
        well: their numbers there are its last arguments. Its monotonic clock is ``ahead`` seconds
        ahead of the system's."""
        order = {
            "arguments": arguments,
            "environment": dict(environment),
            "talks": talks,
            "ahead": ahead,
        }
        reads, writes = os.pipe() if output is None else (-1, output)
        hears, says = os.pipe() if talks else (-1, -1)
        own = [each for each in (writes, hears) if each not in (-1, output)]
        given = [writes, *([hears] if talks else []), *beside]
        with self._lock:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [json.dumps(order).encode()], given)
                pid = self._socket.recv(32)
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0)
                for each in own:
                    os.close(each)
        assert pid, f"the process that forks has ended: {self._process.poll()}"
        stdout = os.fdopen(reads, errors="replace") if output is None else None
        return Forked(int(pid), stdout, os.fdopen(says, "w") if talks else None)


class ForkedChild(Child):
    """A process of a stack, forked where nothing that libraries read at their import differs."""

    __slots__ = ("ahead",)
    ahead: float

    def run(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        server = fork_server(what(self)) if sys.platform == "linux" else None
        if server is None or _of_libraries(environment) != _of_libraries(server.environment):
            return super().run(environment)
        made = server.fork(self.arguments, environment, ahead=self.ahead)
        return cast("subprocess.Popen[str]", made)


@cache
def fork_server(what: str) -> ForkServer:
    """This process's own, for one kind of processes in tests/fork_server.py."""
    return ForkServer(what, {**os.environ, **IMPORTED_WITH.get(what, {})})


def what(child: Child) -> str:
    return "router" if child.arguments[0] == "router" else "worker"


def forked(child: Child) -> Child:
    made = ForkedChild(child.name, child.arguments, child.ready_url, child.environment)
    made.ahead = 0.0
    return made


def _of_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not the process's own."""
    own = {"PYTHONUNBUFFERED"}
    return {
        name: value
        for name, value in environment.items()
        if name not in own and not name.startswith(_OWN)
    }
