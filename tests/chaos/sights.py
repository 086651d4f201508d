"""How soon a router knows of a worker that was killed or stopped."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from stack import Stack

SEEN_SECONDS = 5.0
"""A peer that is dead or hung is to be known as such by then."""
POLL_SECONDS = 0.05


def fleet_of(stack: Stack) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.url}/debug/fleet", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


class Sights:
    def __init__(self, stack: Stack) -> None:
        self.seen: dict[str, list[float]] = {"kill": [], "stop": []}
        """Seconds from the blow until the router knew, by what was done."""
        self._stack = stack
        self._blows: dict[str, float] = {}
        """When each worker that is down now was struck."""

    def over(self, name: str) -> None:
        """A worker runs again, or is about to."""
        self._blows.pop(name, None)

    def watch(self, blow: str, name: str, struck: float) -> None:
        """In a thread: until the router has lost the worker, or the blow is over."""
        words = self._stack.workers[name].arguments
        port = words[words.index("--port") + 1]
        self._blows[name] = struck

        def watch() -> None:
            while self._blows.get(name) == struck:
                with suppress(OSError, ValueError, HTTPException):
                    links = fleet_of(self._stack)["links"]
                    up = [state for where, state in links.items() if port in where]
                    if up and up != ["up"]:
                        self.seen[blow].append(time.monotonic() - struck)
                        return
                time.sleep(POLL_SECONDS)
            self.seen[blow] += [over] if (over := time.monotonic() - struck) > SEEN_SECONDS else []

        threading.Thread(target=watch, daemon=True).start()

    def slow(self, least: float = SEEN_SECONDS) -> list[str]:
        return [
            f"after a {blow} the router knew only {seconds:.1f} s later"
            for blow, times in self.seen.items()
            for seconds in times
            if seconds > least
        ]

    def __str__(self) -> str:
        """For people who read a run; empty if there was no blow."""
        return "; ".join(
            f"{len(times)} of {blow} seen, the slowest after {max(times):.2f} s"
            for blow, times in self.seen.items()
            if times
        )
