"""`make observe`: every panel and rule, asked of a real Prometheus under load.

Two services of a router, prefill and decode workers, one placed by forecasts, whose workers meet at
an agent of the node and pull prefixes from each other; and, beside a real API server, an operator
with a service whose pods a stand-in for nodes makes ready.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from tests.kvtransfer.agent.agent_process import Agent
from tests.observe import operators, report
from tests.observe.asked import PULLING, ROUTERS, asking, everything
from tests.observe.operator_faults import Ground, end_again_and_again
from tests.observe.prometheus import Prometheus, Target
from tests.waiting import wait_for

from tandem.cli.serve.listening import free_ports
from tandem.hub import DEFAULT_MODEL, prepare

OUT = Path("docs/observability-live.md")
WORKERS = ["--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "400"]
WORKERS += ["--kv-offloading-size", "0.1"]
LEAST_SECONDS = 30.0
"""Shorter than this, rates over the boards' minute and the rules' windows mean nothing."""


def main() -> int:
    """Write the page; 1 where a rule failed or an answer is not a finite number."""
    parser = argparse.ArgumentParser(prog="python -m tests.observe", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="page to write")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers of a service")
    parser.add_argument("--decode", type=int, default=1, help="decode workers of a service")
    parser.add_argument("--clients", type=int, default=4, help="clients that ask each at once")
    parser.add_argument("--seconds", type=float, default=90.0, help="load before the questions")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each board")
    parser.add_argument(
        "--no-operator", action="store_true", help="where no API server's programs are at hand"
    )
    options = parser.parse_args()
    if options.seconds < LEAST_SECONDS:
        parser.error(f"--seconds: at least {LEAST_SECONDS:.0f}")
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the stack
    with tempfile.TemporaryDirectory() as name, ExitStack() as open_:
        seen = observe(Path(name), options, open_)
    options.out.write_text(
        report.page(seen, report.told(options), datetime.now(UTC).date().isoformat())
    )
    print(report.summary(seen))
    return int(bool(report.faults(seen)))


def observe(folder: Path, options: argparse.Namespace, open_: ExitStack) -> report.Seen:
    from stack import Stack

    targets = [] if options.no_operator else [_operator(folder, open_)]
    model = str(prepare(DEFAULT_MODEL, progress=False).path)
    urls = []
    near, agent = _agent(open_)
    targets.append(agent)
    for service, flags in ROUTERS.items():
        extra = [*PULLING[service], *near] if service in PULLING else []
        running = open_.enter_context(
            Stack.running(
                model,
                folder / f"{service}.log",
                prefill=options.prefill,
                decode=options.decode,
                worker_flags=[*WORKERS, *extra],
                router_flags=flags,
            )
        )
        urls.append(running.url)
        targets.append(Target(f"{service}-router-0", "router", running.port, service))
        for worker, port in running.probes.items():
            role = worker.partition("-")[0]
            targets.append(Target(f"{service}-{worker}", role, port, service))
    prometheus = open_.enter_context(Prometheus.running(folder, targets))
    for service, url in zip(ROUTERS, urls, strict=True):
        open_.enter_context(asking(service, url, options.clients))
    wait_for(
        lambda: prometheus.targets_up() == len(targets),
        60.0,
        seen=lambda: "not every target answers",
    )
    time.sleep(options.seconds)
    return everything(prometheus, options.pictures)


def _agent(open_: ExitStack) -> tuple[list[str], Target]:
    """A node's agent, and the flags of workers that meet there."""
    # A short name: that of a socket is bounded.
    folder = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
    [port] = free_ports(1)
    agent = Agent(folder, flags=("--probe-port", str(port)))
    open_.callback(agent.end)
    flags = ["--kv-node-folder", str(folder), "--kv-node-copy", "agent"]
    return flags, Target("node-agent-0", "node-agent", port, "")


def _operator(folder: Path, open_: ExitStack) -> Target:
    """An operator with a service that is ready, of which a container ends again and again."""
    home = folder / "plane"
    home.mkdir()
    world = open_.enter_context(operators.world(home))
    ground, target = open_.enter_context(operators.operated(world, "observed"))
    ground.harness.create("ending", decode__replicas=2)
    ground.harness.ready("ending")
    _disturb(ground)
    return target


def _disturb(ground: Ground) -> None:
    """A container ends again and again, and somebody takes a child away, which is put back."""
    end_again_and_again(ground)
    ground.harness.kubectl("delete", "poddisruptionbudget", "--all", "--wait=false")


if __name__ == "__main__":
    sys.exit(main())
