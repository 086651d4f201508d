"""An agent in a process of its own, as nodes have it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_for

SECONDS = 90.0
"""A busy machine starts a process in half a minute."""


class Agent:
    """`tandem node-agent` in a process of its own."""

    def __init__(
        self, folder: Path, isolated: tuple[str, ...] = (), flags: tuple[str, ...] = ()
    ) -> None:
        self._words = ["node-agent", "--kv-node-folder", str(folder)]
        self.folder = folder
        tandem = [sys.executable, "-m", "tandem.cli"]
        self.process = subprocess.Popen(
            [*isolated, *tandem, *self._words, *flags], stderr=subprocess.DEVNULL
        )
        try:
            wait_for(self.status, SECONDS)
        except BaseException:
            self.end()
            raise

    def status(self) -> dict[str, int]:
        """As `--status` prints it; nothing where no agent answers."""
        words = [sys.executable, "-m", "tandem.cli", *self._words, "--status"]
        said = subprocess.run(words, check=False, capture_output=True, timeout=SECONDS)
        found: dict[str, int] = json.loads(said.stdout or "{}")
        return found

    def end(self, number: int = signal.SIGKILL) -> int:
        """By a signal; its status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=SECONDS)
