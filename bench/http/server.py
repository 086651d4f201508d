"""A stack of processes to measure: started by ``tandem``, watched by role, ended with the block."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

TANDEM = [sys.executable, "-m", "tandem.cli"]
STOP_SECONDS = 30.0
START_SECONDS = 300.0
ROLES = ("router", "decode", "prefill")


class Server:
    """A server's processes: who they are and what they say of themselves."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url = url
        self._children: dict[str, psutil.Process] = {}
        for child in psutil.Process(process.pid).children() if process else []:
            role = next((word for word in child.cmdline() if word in ROLES), None)
            if role is not None:
                self._children[role] = child

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time by role, so far."""
        times = {role: child.cpu_times() for role, child in self._children.items()}
        return {role: each.user + each.system for role, each in times.items()}

    def memory_mib(self) -> dict[str, int]:
        """Resident memory by role."""
        return {role: child.memory_info().rss >> 20 for role, child in self._children.items()}

    def kill(self, role: str) -> None:
        """End a process of that role as a crash does."""
        self._children[role].kill()

    def metrics(self, role: str) -> dict[str, float]:
        """Samples of a worker or the router, ``name{labels}`` to value."""
        where = self.url
        if role != "router":
            words = self._children[role].cmdline()
            where = f"http://127.0.0.1:{words[words.index('--probe-port') + 1]}"
        with urllib.request.urlopen(f"{where}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


@contextmanager
def serving(
    arguments: list[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """``tandem ARGUMENTS`` (serve or up) on ``port`` until the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*TANDEM, *arguments, "--port", str(port), "--log-level", "info"],
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _until_ready(url, process, log)
        yield Server(url, process)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit("the server did not start:\n" + log.read_text()[-4000:])
