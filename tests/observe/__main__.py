"""`make observe`: every panel and rule, asked of a real Prometheus over a stack under load."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.observe import judge, report
from tests.observe.prometheus import Prometheus, Target
from tests.screens.load import loaded
from tests.waiting import wait_for

from tandem.hub import DEFAULT_MODEL, prepare

OUT = Path("docs/observability-live.md")
LEAST_SECONDS = 30.0
"""Shorter than this, rates over the boards' minute and the rules' windows mean nothing."""


def main() -> int:
    """Write the page; 1 where a rule failed or an answer is not a finite number."""
    parser = argparse.ArgumentParser(prog="python -m tests.observe", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="page to write")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--decode", type=int, default=1, help="decode workers")
    parser.add_argument("--clients", type=int, default=6, help="clients that ask at once")
    parser.add_argument("--seconds", type=float, default=90.0, help="load before the questions")
    options = parser.parse_args()
    if options.seconds < LEAST_SECONDS:
        parser.error(f"--seconds: at least {LEAST_SECONDS:.0f}")
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the stack
    from stack import Stack

    model = str(prepare(DEFAULT_MODEL, progress=False).path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stack = Stack.running(
            model,
            folder / "stack.log",
            prefill=options.prefill,
            decode=options.decode,
            worker_flags=["--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "400"],
            router_flags=["--min-handoff-tokens", "32"],
        )
        with stack as running:
            targets = [Target("router-0", "router", running.port)]
            for worker, port in running.probes.items():
                targets.append(Target(worker, worker.partition("-")[0], port))
            with (
                Prometheus.running(folder, targets) as prometheus,
                loaded(running.url, clients=options.clients, max_tokens=48),
            ):
                wait_for(
                    lambda: prometheus.targets_up() == len(targets),
                    60.0,
                    seen=lambda: "not every target answers",
                )
                time.sleep(options.seconds)
                seen = report.Seen(
                    judge.panels(prometheus),
                    judge.records(prometheus),
                    judge.alerts(prometheus),
                    prometheus.rules(),
                )
    options.out.write_text(report.page(seen, options, datetime.now(UTC).date().isoformat()))
    print(report.summary(seen))
    return int(bool(report.faults(seen)))


if __name__ == "__main__":
    sys.exit(main())
