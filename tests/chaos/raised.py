"""Raises the line: the processes, the proxies in front of them, the node's agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stack import Stack, stop_all
from tests.chaos import agents
from tests.chaos.aim import Aims
from tests.chaos.line import DRAIN_SECONDS, NUM_BLOCKS, Line
from tests.chaos.proxy import ADVERTISED, Proxy
from tests.chaos.pulls import FLAGS as PULL_FLAGS

from tandem.cli.serve.children import Child

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
    "router_flags": ["--request-timeout", "60", "--enable-admin-api"],
}
"""Little of everything, so that there are chunks, parts, preemptions and evictions."""


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
    workers, and all of them with ``pulls``, where each may pull prefixes from each. With the
    connector ``shm_agent`` a node's agent is next to them."""
    flags = [*FLAGS["worker_flags"]]
    router_flags = FLAGS["router_flags"]
    if pulls:
        flags += PULL_FLAGS["worker_flags"]
        router_flags = [*router_flags, *PULL_FLAGS["router_flags"]]
    if proxied is not None:
        flags += ["--kv-advertise-host", ADVERTISED]
    proxies: list[Proxy] = []
    aims = Aims()
    agent: Child | None = None
    with ExitStack() as undone:
        if connector == agents.TRANSPORT:
            folder = undone.enter_context(agents.node_folder())
            flags += agents.worker_flags(folder)
            agent = agents.agent_child(folder)
            undone.callback(stop_all, [agent], 10.0)
        else:
            flags += ["--kv-connector", connector]

        def prepare(stack: Stack) -> None:
            if agent is not None:
                agent.start(stack.log)
            if proxied is not None:
                for each in _proxies(stack, proxied, "" if pulls else "prefill", aims):
                    undone.callback(each.stop)
                    proxies.append(each)

        running = Stack.running(
            str(model),
            log,
            prefill=workers,
            decode=workers,
            worker_flags=flags,
            router_flags=router_flags,
            prepare=prepare,
        )
        stack = undone.enter_context(running)
        line = Line(stack, proxies, pulls=pulls, agent=agent, aims=aims)
        line.whole()
        try:
            yield line
        finally:
            if line.pulls is not None:
                line.pulls.stop()
            if agent is not None:  # while its output has a log to go to
                stop_all([agent], 10.0)


def _proxies(stack: Stack, seed: int, role: str, aims: Aims) -> Iterator[Proxy]:
    """One for each worker of a role, or of any where it is empty; listening."""
    for number, (name, child) in enumerate(stack.workers.items()):
        if not name.startswith(role):
            continue
        words = child.arguments
        control, data = (
            int(words[words.index(flag) + 1]) for flag in ("--kv-control-port", "--kv-data-port")
        )
        made = Proxy(control, data, seed + number, name=name, aims=aims)
        made.start()
        yield made
