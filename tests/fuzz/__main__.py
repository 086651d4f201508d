"""Requests made from the router's OpenAPI document, thrown at a real stack until the time is over.

    python -m tests.fuzz --seconds 600 --seed 1

The last line says whether all held; the exit status is 0 or 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEY = "fuzz"
LEAK_SECONDS = 60.0
"""By then the last request has met its deadline, and what waited for it is free."""
SETTLE_SECONDS = 240.0
"""What the first phases and the replaying of failures may take beyond ``--seconds``."""
REQUEST_SECONDS = 60.0
SLOWEST_SECONDS = REQUEST_SECONDS + 10.0
"""A request has ended by its deadline; what is added is for two busy cores."""
ROUTER_FLAGS = ["--api-key", KEY, "--request-timeout", f"{REQUEST_SECONDS:g}"]
WORKER_FLAGS = ["--max-model-len", "256"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.fuzz", description="See README.md.")
    made.add_argument("--seconds", type=int, default=600, help="of requests, at least 30")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--clients", type=int, default=2, help="that ask at the same time")
    made.add_argument("--prefill", type=int, default=1, help="0 serves without hand-off")
    made.add_argument(
        "--schemathesis", default=".tools/fuzz/bin/schemathesis", help="path of the program"
    )
    made.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    return made


def fuzz(options: argparse.Namespace, url: str, reports: Path) -> int:
    """schemathesis' exit status: 0 if every answer held to the document."""
    command = [
        *(
            str(Path(options.schemathesis).absolute()),
            "--config-file",
            str(HERE / "schemathesis.toml"),
        ),
        *("run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
        *("--checks", "all", "--max-time", str(options.seconds), "--phases", options.phases),
        *("--seed", str(options.seed), "--workers", str(options.clients)),
        *("--request-timeout", "100", "--max-response-time", f"{SLOWEST_SECONDS:g}"),
        *("--generation-database", "none", "--no-color"),
        *("--report", "junit", "--report-junit-path", str(reports / "junit.xml")),
    ]
    # It keeps what it found in the folder where it runs.
    deadline = options.seconds + SETTLE_SECONDS
    return subprocess.run(command, check=False, cwd=reports, timeout=deadline).returncode


def main() -> int:
    """Raise a stack, throw, and look whether it is whole and has everything back."""
    from client import held_after
    from stack import Stack

    from tandem.hub import DEFAULT_MODEL, prepare

    options = parser().parse_args()
    if options.seconds < 30 or options.clients < 1:
        parser().error("--seconds: 30 or more, --clients: 1 or more is allowed")
    folder = Path(tempfile.mkdtemp(prefix="tandem-fuzz-"))
    model = prepare(DEFAULT_MODEL, progress=False).path
    flags: dict[str, Any] = {"worker_flags": WORKER_FLAGS, "router_flags": ROUTER_FLAGS}
    with Stack.running(str(model), folder / "stack.log", prefill=options.prefill, **flags) as stack:
        problems = [] if fuzz(options, stack.url, folder) == 0 else ["answers, above"]
        problems += [
            f"{child.name} ended: {child.exit_code}"
            for child in stack.children
            if child.exit_code is not None
        ]
        if not problems and (left := held_after(stack, LEAK_SECONDS)):
            problems.append(f"still held: {left}")
        losses = {
            name: count
            for name, count in stack.metrics("router").items()
            if name.startswith("tandem:router_attempt_failures_total{") and count
        }
        print(f"attempts that failed: {losses or 'none'}; log in {folder}")
    print("all held" if not problems else f"did not hold: {'; '.join(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "e2e"))  # the stack
    sys.exit(main())
