"""The router's CPU time per streamed token beside that of an earlier commit, in one run.

Each tree's own ``router_overhead.py`` raises its replaying worker and its router, by its own
Python; both stay up, and rounds take turns, so that a pair of rounds sees the same machine. What is
told is the median of the pairs' ratios, with their quartiles: one round may be off by a fifth.

    git worktree add /tmp/before COMMIT && (cd /tmp/before && make setup)
    .venv/bin/python bench/router_before.py --before /tmp/before --tokens 400 --rounds 12
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def main() -> None:
    """Take turns, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a tree of the earlier commit, set up")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--obey", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.obey:
        obey(args)
        return
    if args.before is None:
        parser.error("--before: the earlier tree")
    here = HERE.parents[1]
    sides = {"before": start(args.before, args), "now": start(here, args)}
    try:
        for side in sides.values():
            ask(side)  # warm
        costs: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds):
            for name in sorted(sides, reverse=bool(number % 2)):
                costs[name].append(ask(sides[name]))
    finally:
        for side in sides.values():
            assert side.stdin is not None
            side.stdin.close()
            side.wait(30)
    found = judge(costs)
    print(json.dumps(found))
    if args.out is not None:
        said = {"commit": commit(args.before), "streams": args.streams, "tokens": args.tokens}
        said |= {"interval_ms": args.interval_ms, "endpoint": args.endpoint}
        content = {"before": said, "now": commit(here), **found, "rounds": costs}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


def judge(costs: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in microseconds a token, and the ratios of pairs."""
    ratios = [now / before for before, now in zip(costs["before"], costs["now"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {f"us_{name}": statistics.median(each) for name, each in costs.items()}
    fastest = min(costs["now"]) / min(costs["before"])
    medians["ratio_of_fastest"] = fastest  # what others on the machine took away least from
    return {**medians, "ratio": middle, "ratio_quartiles": [low, high], "pairs": len(ratios)}


def start(tree: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    """One tree's worker and router, by its own Python, which make a round for each line."""
    command = [str(tree / ".venv/bin/python"), str(HERE), "--obey"]
    for name in ("streams", "tokens", "interval_ms", "endpoint"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(tree / "bench")}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def ask(side: subprocess.Popen[str]) -> float:
    """Microseconds of the router's CPU a token, of one round."""
    assert side.stdin is not None
    assert side.stdout is not None
    side.stdin.write("round\n")
    side.stdin.flush()
    line = side.stdout.readline()
    if not line:
        raise RuntimeError(f"{side.args!r} ended with {side.wait(10)}")
    return float(line)


def commit(tree: Path) -> str:
    """The commit of a tree."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def obey(args: argparse.Namespace) -> None:
    """In a tree's own Python: its stack, and a round for each line of standard input."""
    sys.path.remove(str(HERE.parent))  # this tree's bench, which the script's place puts first
    import psutil
    import router_overhead as bench

    from tandem.cli.ports import free_ports
    from tandem.hub import DEFAULT_MODEL, prepare
    from tandem.text.tokenizer import Tokenizer

    model = str(prepare(DEFAULT_MODEL, progress=False).path)
    token_ids = Tokenizer.load(model).encode(bench.TEXT)
    spawn = multiprocessing.get_context("spawn")
    worker_port, port, *rest = free_ports(len(inspect.signature(bench.route).parameters) - 1)
    worker = spawn.Process(
        target=bench.replay, args=(worker_port, token_ids, args.interval_ms / 1000)
    )
    router = spawn.Process(target=bench.route, args=(port, worker_port, model, *rest))
    worker.start()
    router.start()
    try:
        asyncio.run(bench.wait_ready(port))
        measured = psutil.Process(router.pid)
        known = {"port": port, "grpc_port": next(iter(rest), 0), "args": args}
        known["endpoint"] = args.endpoint  # commits differ in what a round is told
        told = [known[name] for name in inspect.signature(bench.one_round).parameters]
        for _ in sys.stdin:
            before = bench.cpu_seconds(measured)
            asyncio.run(bench.one_round(*told))
            spent = bench.cpu_seconds(measured) - before
            print(1e6 * spent / (args.streams * args.tokens), flush=True)
    finally:
        for process in (router, worker):
            process.terminate()
            process.join(10)


if __name__ == "__main__":
    main()
