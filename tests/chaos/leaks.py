"""What workers still hold once nobody asks anything: blocks, slots, leases, requests, mappings."""

from __future__ import annotations

import re
import time
from pathlib import Path

from client import held
from stack import Stack

_SHARED = re.compile(r"/memfd:|/dev/shm/|tandem-kv")
"""Memory that processes share: their own, and what they map of their peers."""
EVERY_SECONDS = 0.2


def maps_of(stack: Stack) -> dict[str, int]:
    """Shared mappings of each worker; none where the system has no /proc."""
    found = {}
    for name, child in stack.workers.items():
        path = Path(f"/proc/{child.process.pid}/maps" if child.process else "/nowhere")
        if path.exists():
            found[name] = count_shared(path.read_text())
    return found


def count_shared(maps: str) -> int:
    """Lines of /proc/PID/maps that are memory shared with others."""
    return sum(bool(_SHARED.search(line)) for line in maps.splitlines())


def leaks(stack: Stack, before: dict[str, int]) -> list[str]:
    """Each thing that is held now and was not before the run."""
    found = [f"{what} is {value:g} with nobody asking" for what, value in held(stack).items()]
    now = maps_of(stack)
    return found + [
        f"{name} has {now[name]} shared mappings, {count} before the run"
        for name, count in before.items()
        if now.get(name, 0) > count
    ]


def leaks_after(stack: Stack, before: dict[str, int], seconds: float) -> list[str]:
    """What is still held when all is free or the time is over."""
    deadline = time.monotonic() + seconds
    while (left := leaks(stack, before)) and time.monotonic() < deadline:
        time.sleep(EVERY_SECONDS)
    return left
