"""The node's agent beside a line: a process that is hurt as workers are, and starts again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.cli.serve.children import Child
from tandem.cli.serve.listening import LOOPBACK, free_ports

NAME = "agent-0"
TRANSPORT = "shm_agent"


@contextmanager
def node_folder() -> Iterator[Path]:
    """In which an agent and workers meet; a short name: that of a socket is bounded."""
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def agent_child(folder: Path) -> Child:
    (port,) = free_ports(1)
    words = ["node-agent", "--kv-node-folder", str(folder), "--probe-port", str(port)]
    return Child(NAME, words, f"http://{LOOPBACK}:{port}/ready")


def worker_flags(folder: Path) -> list[str]:
    """Links go by the agent; while it is away by what comes next, and then back."""
    return [
        *("--kv-connector", "auto", "--kv-node-folder", str(folder), "--kv-node-copy", "agent"),
    ]


def all_by_agent(fleet: dict[str, Any]) -> bool:
    """Whether every link of a hand-off that is up goes by the agent, as the router has it; those
    that are down are told for a while, though their peers are gone."""
    up = [each for each in fleet["handoff_links"] if each["state"] == "up"]
    return all(each["transport"] == TRANSPORT for each in up)
