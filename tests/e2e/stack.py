"""A real stack of processes for the end-to-end tests: start, look into, hurt, stop."""

from __future__ import annotations

import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tests.forked import forked
from tests.own_ports import own_ports
from tests.waiting import wait_for

from tandem.cli.serve.children import Child
from tandem.cli.serve.listening import LOOPBACK
from tandem.cli.serve.stack import Ports, router_child, worker_child

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? (\S+)$")


class Stack:
    """Children of one stack; ``Stack.running`` starts it and always stops it."""

    def __init__(
        self,
        model: str,
        log: TextIO,
        *,
        prefill: int = 1,
        decode: int = 1,
        worker_flags: list[str] | None = None,
        router_flags: list[str] | None = None,
        prefill_flags: list[str] | None = None,
        decode_flags: list[str] | None = None,
        reference: str = "smollm2",
    ) -> None:
        """``reference`` names the rows of tests/reference that hold the model's tokens."""
        numbers = iter(own_ports(4 * (prefill + decode) + 1))
        shared = ["--served-model-name", "smol", "--log-level", "info", *(worker_flags or [])]
        self.log = log
        self.reference = reference
        self.workers: dict[str, Child] = {}
        self.probes: dict[str, int] = {}
        ports = []
        own = {"prefill": prefill_flags or [], "decode": decode_flags or []}
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                each = Ports(next(numbers), next(numbers), next(numbers), next(numbers))
                child = forked(worker_child(role, index, model, each, [*shared, *own[role]]))
                ports.append(each.worker)
                self.workers[child.name] = child
                self.probes[child.name] = each.probe
        self.port = next(numbers)
        flags = ["--served-model-name", "smol", "--strict-handoff", *(router_flags or [])]
        flags += ["--ready-prefill", str(prefill), "--ready-decode", str(decode)]
        self.router = forked(router_child(model, LOOPBACK, self.port, ports, flags))

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def children(self) -> list[Child]:
        return [*self.workers.values(), self.router]

    @classmethod
    @contextmanager
    def running(
        cls,
        model: str,
        log_path: Path,
        *,
        prepare: Callable[[Stack], None] = lambda stack: None,
        **options: object,
    ) -> Iterator[Stack]:
        """A stack that can serve; its processes' output is in ``log_path``. ``prepare`` is called
        when its ports are known and nothing runs yet."""
        with log_path.open("w") as log:
            stack = cls(model, log, **options)  # type: ignore[arg-type]
            prepare(stack)
            try:
                for child in stack.children:
                    child.start(log)
                stack.wait_ready()
                yield stack
            finally:
                stop_all(stack.children, 10.0)

    def wait_ready(self, seconds: float = 120.0) -> None:
        """Until the router can serve; fails with the log's end."""
        self.until(self.router.check_ready, seconds, "the router is not ready")

    def until(self, check: Callable[[], bool], seconds: float, problem: str) -> None:
        """Poll ``check`` until it holds; fails with ``problem`` at the deadline."""

        def checked() -> bool:
            for child in self.children:
                code = child.exit_code
                assert code is None or child.name in self.killed, f"{child.name} ended: {code}"
            return check()

        wait_for(checked, seconds, every=0.05, seen=lambda: problem)

    killed: frozenset[str] = frozenset()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Hurt one worker; a killed one is waited for."""
        child = self.workers[name]
        child.signal(number)
        if number == signal.SIGKILL and child.process is not None:
            child.process.wait(10)
            child.join_output()
            self.killed = self.killed | {name}

    def holder(self, role: str) -> str:
        """The worker of a role that has a request, running or waiting; fails where none has."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        found: list[str] = []

        def holds() -> bool:
            of_role = (name for name in self.workers if name.startswith(role))
            found[:] = [each for each in of_role if any(self.total(each, n) for n in names)]
            return bool(found)

        self.until(holds, 30.0, f"no {role} worker has a request")
        return found[0]

    def restart(self, name: str) -> None:
        """Start a killed worker again on the same addresses."""
        self.killed = self.killed - {name}
        self.workers[name].start(self.log)

    def metrics(self, name: str) -> dict[str, float]:
        """Samples of a worker (or "router"): ``name{labels}`` to value."""
        port = self.port if name == "router" else self.probes[name]
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=5) as answer:
            return parse_metrics(answer.read().decode())

    def total(self, name: str, metric: str) -> float:
        """Sum of a metric's samples over its labels."""
        return sum(
            value
            for sample, value in self.metrics(name).items()
            if sample.partition("{")[0] == metric
        )


def parse_metrics(text: str) -> dict[str, float]:
    samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            samples[match[1] + (match[2] or "")] = float(match[3])
    return samples


def stop_all(children: list[Child], grace: float) -> None:
    """SIGTERM to all, SIGKILL after ``grace`` seconds, and wait for each."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        if child.process is None:
            continue
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        child.kill()
