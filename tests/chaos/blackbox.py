"""Any OpenAI server whose workers have process ids: requests, clients that leave, and signals.

Needs nothing of Tandem; this file's neighbours ``schedule``, ``load``, ``judge``, ``faults`` and
``run`` and the package httpx are all.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from tests.chaos.schedule import Kind

START_SECONDS = 300.0
"""For whoever looks after the workers to start one again."""


def read_pids(words: str) -> dict[str, list[int]]:
    """``prefill=12,prefill=13,decode=14`` as lists by role. Raises ValueError, with the word."""
    found: dict[str, list[int]] = {}
    for word in words.replace("\n", ",").split(","):
        if not word.strip():
            continue
        role, _, pid = word.strip().partition("=")
        if not role or not pid.isdecimal() or int(pid) < 2:
            raise ValueError(f"pids: {word!r} is not allowed; ROLE=PID is, as in prefill=1234")
        found.setdefault(role, []).append(int(pid))
    return found


class Pids:
    """Processes by their ids, which are asked for anew where a command says them."""

    def __init__(self, ask: Callable[[], dict[str, list[int]]]) -> None:
        self._ask = ask
        self._hurt: dict[str, int] = {}
        self.roles = sorted(ask())
        if not self.roles:
            raise ValueError("pids: none are named; ROLE=PID,... is allowed")

    @classmethod
    def fixed(cls, words: str) -> Pids:
        """Those that are named, for good: they may be stopped and continued, not killed."""
        pids = read_pids(words)
        return cls(lambda: pids)

    @classmethod
    def said_by(cls, command: str) -> Pids:
        """Those that a command prints whenever it is asked."""
        words = shlex.split(command)

        def ask() -> dict[str, list[int]]:
            done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
            return read_pids(done.stdout)

        return cls(ask)

    def name_of(self, role: str, worker: int) -> str:
        """``role-number``. Where a role has nobody just now, another role's worker."""
        pids = self._ask()
        held = role if pids.get(role) else next((each for each in pids if pids[each]), role)
        return f"{held}-{worker % max(1, len(pids.get(held, ())))}"

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the process that has the name now; one that is killed is waited for."""
        if number == signal.SIGCONT:
            pid = self._hurt.pop(name)
        else:
            role, _, index = name.rpartition("-")
            pid = self._ask()[role][int(index)]
            self._hurt[name] = pid
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def disturb(self, name: str, kind: Kind, seconds: float) -> None:
        """Nothing is known here of how workers reach each other."""
        raise NotImplementedError(f"{kind} of {name} for {seconds:g} s")

    def start(self, name: str, ahead: float = 0.0) -> None:
        """Somebody else does."""

    def wait(self, name: str) -> None:
        """Wait until somebody has started it again: its role has as many live processes as before.
        Raises TimeoutError."""
        role, _, index = name.rpartition("-")
        gone = self._hurt.pop(name)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            pids = self._ask().get(role, [])
            if gone not in pids and len(pids) > int(index):
                return
            time.sleep(0.5)
        raise TimeoutError(f"{name} (pid {gone}) was not started again in {START_SECONDS:g} s")
