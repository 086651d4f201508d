"""A router and two GPUs' workers on a clock: ``python -m bench.sim --help``, from the repository.

The router's placement and accounts, the engines' schedulers, block managers and connectors are the
real ones; what a step, a copy and a message take comes from ``times.py``, fitted to two H100s. No
GPU is needed; a seed gives the same figures every time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.sim import seeds
from bench.sim.figures import figures
from bench.sim.named_loads import RATES, load_of
from bench.sim.stack import SHAPES, Stack


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="one load on one shape; JSON")
    one.add_argument("--shape", choices=sorted(SHAPES), default="1P1D")
    one.add_argument("--load", choices=sorted(RATES), default="uniform")
    one.add_argument("--rate", type=float, default=18.0, help="requests a second, or sessions")
    one.add_argument(
        "--set", action="append", default=[], metavar="NAME=N", help="a setting of every engine"
    )
    several = commands.add_parser("seeds", help="goodput of three shapes over seeds; a table")
    several.add_argument("--loads", default=seeds.LOADS, help="load:rate, with commas between")
    several.add_argument("--seeds", default="1,2,3,4,5", help="with commas between")
    for each in (one, several):
        each.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
        if each is not several:
            each.add_argument("--seed", type=int, default=1)
        each.add_argument("--trace", type=Path, help="CSV of a trace, as tandem bench serve reads")
    args = parser.parse_args()
    if not 1.0 <= args.seconds <= 3600.0:
        parser.error(f"--seconds: {args.seconds:g}, must be 1 to 3600")
    if args.command == "run" and not 0.0 < args.rate <= 1000.0:
        parser.error(f"--rate: {args.rate:g}, must be above 0, up to 1000")
    if args.command == "seeds":
        _check_seeds(parser, args)
    for each in args.set if args.command == "run" else ():
        if not each.partition("=")[2].isdecimal():
            parser.error(f"--set: {each}, must be NAME=N with a whole number")
    needs = args.command == "run" and args.load == "trace"
    if args.command == "seeds":
        needs = any(name == "trace" for name, _ in args.loads)
    if needs and args.trace is None:
        parser.error("--trace: none, must be a CSV file, as a load is a trace")
    return args


def _check_seeds(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    loads = []
    for each in args.loads.split(","):
        name, _, rate = each.partition(":")
        if name not in RATES or not rate.isdecimal() or not 0 < int(rate) <= 1000:
            known = ", ".join(RATES)
            parser.error(f"--loads: {each}, must be LOAD:RATE, of {known}, with 1 to 1000")
        loads.append((name, float(rate)))
    for each in args.seeds.split(","):
        if not each.isdecimal():
            parser.error(f"--seeds: {each}, must be a whole number")
    args.loads, args.seeds = loads, [int(each) for each in args.seeds.split(",")]


def main() -> None:
    """Run what was asked for, and print it."""
    args = arguments()
    if args.command == "seeds":
        print(seeds.table(seeds.over_seeds(args.loads, args.seeds, args.seconds, args.trace)))
    else:
        engine: dict[str, Any] = {
            name: int(value) for name, _, value in (s.partition("=") for s in args.set)
        }
        stack = Stack(SHAPES[args.shape], seed=args.seed, **engine)
        load = load_of(args.load, args.seconds, args.seed, args.trace)(args.rate)
        found: dict[str, object] = {**figures(load(stack)).row(), "ways": dict(stack.router.ways)}
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
