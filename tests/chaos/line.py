"""Two prefill and two decode workers of this project, with a router: raised, hurt, looked after."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence

from stack import Stack
from tests.chaos.agents import all_by_agent
from tests.chaos.aim import Aims
from tests.chaos.clocks import set_clock
from tests.chaos.leaks import leaks, leaks_after, maps_of
from tests.chaos.memory import Flipper
from tests.chaos.proxy import Proxy
from tests.chaos.pulls import PullWatch
from tests.chaos.schedule import Kind
from tests.chaos.sights import Sights, fleet_of
from tests.forked import ForkedChild
from tests.waiting import wait_for

from tandem.cli.serve.children import Child

READY_SECONDS = 120.0
DRAIN_SECONDS = 2.0
NUM_BLOCKS = 300
LEAK_SECONDS = 60.0
"""By then all is free: the last request's deadline, and what waits for it, lie behind."""


class Line:
    """Processes of a stack by name; says who died of himself."""

    def __init__(
        self,
        stack: Stack,
        proxies: Sequence[Proxy] = (),
        *,
        pulls: bool = False,
        agent: Child | None = None,
        aims: Aims | None = None,
    ) -> None:
        """``agent`` of the node, where KV goes by one; ``aims`` are those of the ``proxies``."""
        self.stack = stack
        self.aims = Aims() if aims is None else aims
        self.proxies = proxies
        """In front of each worker that is read from, if any."""
        self.pulls = PullWatch(stack) if pulls else None
        self.died: list[str] = []
        """Processes that ended and were not told to, or not with the status that is due."""
        self.sights = Sights(stack)
        self.before: dict[str, int] = {}
        self.flippers: list[Flipper] = []
        self._agent = agent
        self._ahead = 0.0
        """Of the clock of what was started last and not forked."""
        self._told: set[str] = set()

    def name_of(self, role: str, worker: int) -> str:
        if role == "agent":
            assert self._agent is not None, "KV goes by no agent"
            return self._agent.name
        if role == "link":
            return f"link-{worker % len(self.proxies)}"
        count = sum(name.startswith(role) for name in self.stack.workers)
        return f"{role}-{worker % count}"

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send it. One that ends is waited for; a worker that is killed or stopped is watched until
        that is seen."""
        child = self._child(name)
        struck = time.monotonic()
        if number == signal.SIGCONT:
            self.sights.over(name)
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
            self._watch("kill", child, struck)
        elif number == signal.SIGSTOP:
            self._watch("stop", child, struck)

    def disturb(self, name: str, kind: Kind, seconds: float) -> None:
        """All that passes to and from ``link-number``, or what lies in a worker's memory."""
        if kind is Kind.FLIP:
            self.flippers.append(Flipper(self.pid_of(name), NUM_BLOCKS, seed=len(self.flippers)))
            self.flippers[-1].flip_for(seconds)
            return
        self.proxies[int(name.rpartition("-")[2])].disturb(kind, seconds)

    def start(self, name: str, ahead: float = 0.0) -> None:
        """Start one that has ended, on the same addresses."""
        child = self._child(name)
        if isinstance(child, ForkedChild):
            child.ahead = ahead
        elif ahead != self._ahead:
            set_clock(ahead)
            self._ahead = ahead
        self.sights.over(name)
        child.join_output()
        child.start(self.stack.log)
        self._told.discard(name)

    def wait(self, name: str) -> None:
        """Until it serves, or has ended, which is noted."""
        child = self._child(name)
        wait_for(
            lambda: child.check_ready() or child.exit_code is not None, READY_SECONDS, every=0.2
        )
        self.look()

    def look(self) -> None:
        """Note who has ended without being told."""
        for child in (*self.stack.children, *self._agents):
            if child.exit_code is not None and child.name not in self._told:
                self._told.add(child.name)
                self.died.append(f"{child.name} ended of itself with {child.exit_code}")

    def whole(self) -> None:
        """Wait until every worker is linked to the router, and to all that it reads from."""

        def whole() -> bool:
            self.look()
            fleet = fleet_of(self.stack)
            workers = fleet["workers"]
            count = len(self.stack.workers)
            linked = [sum(each["peers"].values()) for each in workers]
            if self.pulls is not None and len(fleet["pull_links"]) != count * (count - 1):
                return False
            if self._agent is not None and not all_by_agent(fleet):
                return False
            prefills = sum(name.startswith("prefill") for name in self.stack.workers)
            return len(workers) == count and linked.count(prefills) == count - prefills

        wait_for(whole, READY_SECONDS, every=0.1, seen=lambda: fleet_of(self.stack))

    def remember(self) -> None:
        """How it is before anything breaks: what it holds later is compared with that."""
        self.before = maps_of(self._held_by)
        if self.pulls is not None:
            self.pulls.start()

    def problems(self) -> list[str]:
        """After a run: who died of himself, who was seen too late, and what is still held."""
        try:
            self.whole()
        except AssertionError as error:
            return [*self.died, f"the line is not whole again: {error}"]
        left = leaks_after(self.leaks, LEAK_SECONDS)
        if self.pulls is not None:
            self.pulls.stop()
            left += self.pulls.problems()
        return [*self.died, *self.sights.slow(), *left]

    def summary(self) -> str:
        words = [said] if (said := str(self.sights)) else []
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

    def leaks(self) -> list[str]:
        """What is held now and was not before anything broke."""
        return leaks(self.stack, self._held_by, self.before)

    def pid_of(self, name: str) -> int:
        process = self.stack.workers[name].process
        assert process is not None, f"{name} was not started"
        return process.pid

    @property
    def _agents(self) -> list[Child]:
        return [] if self._agent is None else [self._agent]

    @property
    def _held_by(self) -> list[Child]:
        return [*self.stack.workers.values(), *self._agents]

    def _child(self, name: str) -> Child:
        if self._agent is not None and name == self._agent.name:
            return self._agent
        return self.stack.workers[name]

    def _watch(self, blow: str, child: Child, struck: float) -> None:
        if child is not self._agent:  # of which routers know nothing
            self.sights.watch(blow, child.name, struck)
