"""An agent in a process of its own, as nodes have it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.forked import Forked, fork_server
from tests.waiting import wait_for

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig
from tandem.kvtransfer.nodeagent.run import status_of

SECONDS = 90.0
"""A busy machine starts a process in half a minute."""


def started(words: list[str], isolated: tuple[str, ...]) -> subprocess.Popen[bytes] | Forked:
    """Start a command of `tandem` whose output is dropped."""
    if isolated or sys.platform != "linux":
        command = [*isolated, sys.executable, "-m", "tandem.cli", *words]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)
    with open(os.devnull, "wb") as nowhere:
        return fork_server("handoff").fork(words, os.environ, output=nowhere.fileno())


class Agent:
    """`tandem node-agent` in a process of its own."""

    def __init__(
        self, folder: Path, isolated: tuple[str, ...] = (), flags: tuple[str, ...] = ()
    ) -> None:
        """Start one by the command ``isolated``, or fork it from a process that has imported it."""
        self._words = ["node-agent", "--kv-node-folder", str(folder)]
        self.folder = folder
        self.process = started([*self._words, *flags], isolated)
        try:
            self.status()
        except BaseException:
            self.end()
            raise

    def status(self) -> dict[str, int]:
        """What it has counted, asked from this process until it answers."""
        config = NodeAgentConfig(kv_node_folder=str(self.folder))

        def told() -> dict[str, int] | None:
            try:
                return status_of(config)
            except TransportError:  # none is there yet, or it has no time for an answer
                return None

        return wait_for(told, SECONDS, every=0.05)

    def printed(self) -> dict[str, int]:
        """The same as `--status` prints it, in a process of its own."""
        words = [sys.executable, "-m", "tandem.cli", *self._words, "--status"]
        said = subprocess.run(words, check=True, capture_output=True, timeout=SECONDS)
        found: dict[str, int] = json.loads(said.stdout)
        return found

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=SECONDS)
