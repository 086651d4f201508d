"""Two prefill and two decode workers of this project, with a router: raised, hurt, looked after."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stack import Stack
from tests.chaos.clocks import set_clock
from tests.chaos.leaks import leaks_after, maps_of
from tests.chaos.memory import Flipper
from tests.chaos.proxy import ADVERTISED, Proxy
from tests.chaos.pulls import FLAGS as PULL_FLAGS
from tests.chaos.pulls import PullWatch
from tests.chaos.schedule import Kind
from tests.waiting import wait_for

SEEN_SECONDS = 5.0
"""A peer that is dead or hung is to be known as such by then."""
POLL_SECONDS = 0.05
READY_SECONDS = 120.0
DRAIN_SECONDS = 2.0
NUM_BLOCKS = 300
LEAK_SECONDS = 60.0
"""By then all is free: the last request's deadline, and what waits for it, lie behind."""
FLAGS = {
    "worker_flags": [
        *(
            "--max-model-len",
            "1024",
            "--block-size",
            "16",
            "--num-gpu-blocks-override",
            f"{NUM_BLOCKS}",
        ),
        *("--max-num-batched-tokens", "128", "--drain-seconds", f"{DRAIN_SECONDS:g}"),
    ],
    "router_flags": ["--request-timeout", "60"],
}
"""Little of everything, so that there are chunks, parts, preemptions and evictions."""


class Line:
    """Processes of a stack by name; says who died of himself."""

    def __init__(self, stack: Stack, proxies: Sequence[Proxy] = (), *, pulls: bool = False) -> None:
        self.stack = stack
        self.proxies = proxies
        """In front of each worker that is read from, if any."""
        self.pulls = PullWatch(stack) if pulls else None
        self.died: list[str] = []
        """Processes that ended and were not told to, or not with the status that is due."""
        self.seen: dict[str, list[float]] = {"kill": [], "stop": []}
        """Seconds from the blow until the router knew, by what was done."""
        self.before: dict[str, int] = {}
        self.flippers: list[Flipper] = []
        self._ahead = 0.0
        """Of the clock of whatever was started last."""
        self._blows: dict[str, float] = {}
        """When each worker that is down now was struck."""
        self._told: set[str] = set()

    def name_of(self, role: str, worker: int) -> str:
        """``role-number``."""
        if role == "link":
            return f"link-{worker % len(self.proxies)}"
        count = sum(name.startswith(role) for name in self.stack.workers)
        return f"{role}-{worker % count}"

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send it. One that ends is waited for; one that is killed or stopped, until it is seen."""
        child = self.stack.workers[name]
        struck = time.monotonic()
        if number == signal.SIGCONT:
            self._blows.pop(name, None)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._told.add(name)
        child.signal(number)
        if number == signal.SIGTERM and child.process is not None:
            try:
                code = child.process.wait(DRAIN_SECONDS + 30)
                if code not in (0, -signal.SIGTERM):
                    self.died.append(f"{name} was told to end and ended with {code}")
            except subprocess.TimeoutExpired:
                self.died.append(f"{name} was told to end and did not")
                child.kill()
        elif number == signal.SIGKILL and child.process is not None:
            child.process.wait(10)
            self._watch("kill", name, struck)
        elif number == signal.SIGSTOP:
            self._watch("stop", name, struck)

    def disturb(self, name: str, kind: Kind, seconds: float) -> None:
        """All that passes to and from ``link-number``, or what lies in a worker's memory."""
        if kind is Kind.FLIP:
            process = self.stack.workers[name].process
            assert process is not None
            self.flippers.append(Flipper(process.pid, NUM_BLOCKS, seed=len(self.flippers)))
            self.flippers[-1].flip_for(seconds)
            return
        self.proxies[int(name.rpartition("-")[2])].disturb(kind, seconds)

    def start(self, name: str, ahead: float = 0.0) -> None:
        """Start one that has ended, on the same addresses."""
        if ahead != self._ahead:
            set_clock(ahead)
            self._ahead = ahead
        child = self.stack.workers[name]
        self._blows.pop(name, None)
        child.join_output()
        child.start(self.stack.log)
        self._told.discard(name)

    def wait(self, name: str) -> None:
        """Until it serves, or has ended, which is noted."""
        child = self.stack.workers[name]
        wait_for(
            lambda: child.check_ready() or child.exit_code is not None, READY_SECONDS, every=0.2
        )
        self.look()

    def look(self) -> None:
        """Note who has ended without being told."""
        for child in self.stack.children:
            if child.exit_code is not None and child.name not in self._told:
                self._told.add(child.name)
                self.died.append(f"{child.name} ended of itself with {child.exit_code}")

    def whole(self) -> None:
        """Wait until every worker is linked to the router, and to all that it reads from."""

        def whole() -> bool:
            self.look()
            fleet = self.fleet()
            workers = fleet["workers"]
            count = len(self.stack.workers)
            linked = [sum(each["peers"].values()) for each in workers]
            if self.pulls is not None and len(fleet["pull_links"]) != count * (count - 1):
                return False
            prefills = sum(name.startswith("prefill") for name in self.stack.workers)
            return len(workers) == count and linked.count(prefills) == count - prefills

        wait_for(whole, READY_SECONDS, every=0.1, seen=self.fleet)

    def remember(self) -> None:
        """How it is before anything breaks: what it holds later is compared with that."""
        self.before = maps_of(self.stack)
        if self.pulls is not None:
            self.pulls.start()

    def problems(self) -> list[str]:
        """After a run: who died of himself, who was seen too late, and what is still held."""
        try:
            self.whole()
        except AssertionError as error:
            return [*self.died, f"the line is not whole again: {error}"]
        left = leaks_after(self.stack, self.before, LEAK_SECONDS)
        if self.pulls is not None:
            self.pulls.stop()
            left += self.pulls.problems()
        return [*self.died, *self.slow_sights(), *left]

    def summary(self) -> str:
        """How soon blows were seen."""
        words = [
            f"{len(times)} of {blow} seen, the slowest after {max(times):.2f} s"
            for blow, times in self.seen.items()
            if times
        ]
        hurt = Counter[str]()
        for each in self.proxies:
            hurt.update({str(kind): count for kind, count in each.hurt.items()})
        passed = sum(each.passed for each in self.proxies)
        if passed:
            words += [f"of {passed} units between workers {dict(hurt)}"]
        if self.flippers:
            words += [f"{sum(each.flipped for each in self.flippers)} bits flipped"]
        if self.pulls is not None:
            words += [str(self.pulls)]
        return "; ".join(words) or "no blow that a router would see"

    def fleet(self) -> dict[str, Any]:
        """What the router says of its workers."""
        with urllib.request.urlopen(f"{self.stack.url}/debug/fleet", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def slow_sights(self, least: float = SEEN_SECONDS) -> list[str]:
        """Who was seen too late."""
        return [
            f"after a {blow} the router knew only {seconds:.1f} s later"
            for blow, times in self.seen.items()
            for seconds in times
            if seconds > least
        ]

    def _watch(self, blow: str, name: str, struck: float) -> None:
        """In a thread: until the router has lost the worker, or the blow is over."""
        port = self.stack.workers[name].arguments[
            self.stack.workers[name].arguments.index("--port") + 1
        ]

        self._blows[name] = struck

        def watch() -> None:
            while self._blows.get(name) == struck:
                with suppress(OSError, ValueError):
                    up = [state for where, state in self.fleet()["links"].items() if port in where]
                    if up and up != ["up"]:
                        self.seen[blow].append(time.monotonic() - struck)
                        return
                time.sleep(POLL_SECONDS)
            self.seen[blow] += [over] if (over := time.monotonic() - struck) > SEEN_SECONDS else []

        threading.Thread(target=watch, daemon=True).start()


@contextmanager
def raised(
    model: Path,
    log: Path,
    connector: str,
    *,
    workers: int = 2,
    proxied: int | None = None,
    pulls: bool = False,
) -> Iterator[Line]:
    """The line, ready to serve; ended at the end, however that comes. ``proxied``: a seed, and what
    passes between the workers passes a proxy in front of each one that is read from: prefill
    workers, and all of them with ``pulls``, where each may pull prefixes from each."""
    flags = [*FLAGS["worker_flags"], "--kv-connector", connector]
    router_flags = FLAGS["router_flags"]
    if pulls:
        flags += PULL_FLAGS["worker_flags"]
        router_flags = [*router_flags, *PULL_FLAGS["router_flags"]]
    if proxied is not None:
        flags += ["--kv-advertise-host", ADVERTISED]
    proxies: list[Proxy] = []

    def prepare(stack: Stack) -> None:
        if proxied is not None:
            proxies.extend(_proxies(stack, proxied, "" if pulls else "prefill"))

    try:
        with Stack.running(
            str(model),
            log,
            prefill=workers,
            decode=workers,
            worker_flags=flags,
            router_flags=router_flags,
            prepare=prepare,
        ) as stack:
            line = Line(stack, proxies, pulls=pulls)
            line.whole()
            yield line
            if line.pulls is not None:
                line.pulls.stop()
    finally:
        for each in proxies:
            each.stop()


def _proxies(stack: Stack, seed: int, role: str) -> Iterator[Proxy]:
    """One for each worker of a role, or of any where it is empty; listening."""
    for number, (name, child) in enumerate(stack.workers.items()):
        if not name.startswith(role):
            continue
        words = child.arguments
        control, data = (
            int(words[words.index(flag) + 1]) for flag in ("--kv-control-port", "--kv-data-port")
        )
        made = Proxy(control, data, seed + number)
        made.start()
        yield made
