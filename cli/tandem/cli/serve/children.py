"""Processes of a local stack: start, watch, restart and stop them; all end with their parent.

Each has its own session, so that Ctrl-C reaches the supervisor only.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TextIO

from tandem.base.listening import ENV_CHILD_TOKEN, HEADER_CHILD_TOKEN
from tandem.cli.serve.listening import DIRECT
from tandem.protocol.names import ENV_PREFIX

ENV_PARENT = "TANDEM_PARENT_PID"
_PR_SET_PDEATHSIG = 1
RESTART_WINDOW_SECONDS = 60.0
MAX_RESTARTS = 5
"""Maximum restarts within the window."""


def end_with_parent() -> None:
    """End this process with SIGTERM when the supervisor in ``TANDEM_PARENT_PID`` ends."""
    parent = os.environ.get(ENV_PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)


def be_killed_with(parent: int) -> None:
    """End this process with SIGKILL when ``parent`` ends. Must be called first.

    Otherwise a process of a pool waits forever, because its siblings hold its pipe open.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class Child:
    """Process of the stack."""

    name: str
    arguments: list[str]
    ready_url: str
    environment: dict[str, str] = field(default_factory=dict)
    """Variables in addition to the parent's."""
    process: subprocess.Popen[str] | None = None
    started: float = 0.0
    ready: bool = False
    restarts: list[float] = field(default_factory=list)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Token in its answers at /ready, which other programs lack."""
    _copier: threading.Thread | None = None

    def start(self, log: TextIO) -> None:
        """Start the process. Its output is written to ``log``, each line with its name."""
        environment = {**os.environ, ENV_PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        environment |= self.environment | {ENV_CHILD_TOKEN: self.token}
        environment.pop(ENV_PREFIX + "CONFIG", None)  # the file of `up` has other keys
        self.process = self.run(environment)
        self.started = time.monotonic()
        self.ready = False
        self._copier = threading.Thread(
            target=self._copy_output, args=(self.process, log), daemon=True
        )
        self._copier.start()

    def run(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tandem.cli", *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )

    def _copy_output(self, process: subprocess.Popen[str], log: TextIO) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                is_object = line.startswith("{") and line.endswith("}\n")
                log.write(line if is_object else f"{self.name:<10} | {line}")
                log.flush()

    def join_output(self) -> None:
        """Wait up to a second for the last lines of an ended process."""
        if self._copier is not None:
            self._copier.join(1.0)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def may_restart(self, now: float) -> bool:
        """Count a death. Return whether to restart the child."""
        self.restarts = [when for when in self.restarts if now - when < RESTART_WINDOW_SECONDS]
        self.restarts.append(now)
        return len(self.restarts) <= MAX_RESTARTS

    def check_ready(self) -> bool:
        """Request /ready once. An answer without the token does not count."""
        try:
            with DIRECT.open(self.ready_url, timeout=1.0) as answer:
                shown = answer.headers.get(HEADER_CHILD_TOKEN)
                self.ready = answer.status == 200 and shown == self.token and self.is_running
        except (HTTPException, urllib.error.URLError, OSError):
            self.ready = False
        return self.ready

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, and write its last lines."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.join_output()
