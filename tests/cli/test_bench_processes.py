"""`tandem bench serve --client-processes`: none of its processes outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.cli.answering import Answer, served

SECONDS = 60.0
CLIENTS = 2


def parents() -> dict[int, int]:
    """The parent of every process of this machine that has not ended."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="no word of a parent's death elsewhere")
def test_clients_end_with_the_command() -> None:
    """Killed, as by a caller's timeout, it leaves nobody who loads the server for an hour."""
    asked = threading.Semaphore(0)
    gone = threading.Event()

    class Silent(Answer):
        def do_POST(self) -> None:
            asked.release()
            gone.wait(SECONDS)

    with served(Silent) as url:
        words = ["bench", "serve", "--base-url", url, "--model", "m", "--num-prompts", "4"]
        words += ["--num-warmups", "0", "--client-processes", str(CLIENTS)]
        command = subprocess.Popen([sys.executable, "-m", "tandem.cli", *words])
        try:
            for _ in range(CLIENTS):
                assert asked.acquire(timeout=SECONDS)
            mine = {pid for pid, parent in parents().items() if parent == command.pid}
            assert len(mine) >= CLIENTS + 1, "clients, and who lets them begin together"
        finally:
            command.kill()
            command.wait(SECONDS)
        deadline = time.monotonic() + SECONDS
        while left := mine & parents().keys():
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"{len(left)} processes of the command run on")
            time.sleep(0.02)
        gone.set()
