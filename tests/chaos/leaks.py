"""What workers still hold once nobody asks anything: blocks, slots, leases, requests, mappings."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from client import held
from stack import Stack

from tandem.cli.serve.children import Child

_SHARED = re.compile(r"/memfd:|/dev/shm/|tandem-kv")
"""Memory that processes share: their own, and what they map of their peers."""
EVERY_SECONDS = 0.2


def maps_of(children: Iterable[Child]) -> dict[str, int]:
    """Shared mappings of each process; none where the system has no /proc."""
    found = {}
    for child in children:
        path = Path(f"/proc/{child.process.pid}/maps" if child.process else "/nowhere")
        if path.exists():
            found[child.name] = count_shared(path.read_text())
    return found


def count_shared(maps: str) -> int:
    """Lines of /proc/PID/maps that are memory shared with others."""
    return sum(bool(_SHARED.search(line)) for line in maps.splitlines())


def leaks(stack: Stack, children: Iterable[Child], before: dict[str, int]) -> list[str]:
    """Each thing that workers hold now and that nobody asks for, and mappings of ``children`` that
    were not there before the run."""
    found = [f"{what} is {value:g} with nobody asking" for what, value in held(stack).items()]
    now = maps_of(children)
    return found + [
        f"{name} has {now[name]} shared mappings, {count} before the run"
        for name, count in before.items()
        if now.get(name, 0) > count
    ]


def leaks_after(found: Callable[[], list[str]], seconds: float) -> list[str]:
    """What is still held when all is free or the time is over."""
    deadline = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(EVERY_SECONDS)
    return left
