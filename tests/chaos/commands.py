"""The two commands: flags in, a report and an exit status out."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.blackbox import Pids
from tests.chaos.run import Target, run
from tests.chaos.schedule import (
    LINK_KINDS,
    PROCESS_KINDS,
    PULL_KINDS,
    Kind,
    Schedule,
    make_schedule,
)

CONNECTORS = ("tcp", "nixl", "shm", "shm_agent")
AT_ONCE = 12
MODEL = "smol"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.chaos", description="See README.md.")
    commands = top.add_subparsers(dest="command", required=True)
    line = commands.add_parser("line", help="raise two prefill and two decode workers, hurt them")
    line.add_argument("--connector", choices=CONNECTORS, default="tcp")
    line.add_argument(
        "--links",
        action="store_true",
        help="hurt frames and bytes between workers, too",
    )
    line.add_argument(
        "--bits", action="store_true", help="flip bits in the memory of prefill workers, too"
    )
    line.add_argument(
        "--clocks",
        action="store_true",
        help="start killed workers with clocks that are days ahead, too (wants root)",
    )
    line.add_argument(
        "--pulls",
        action="store_true",
        help="workers pull cached prefixes from each other; a run in which none does has failed",
    )
    line.add_argument(
        "--aimed",
        action="store_true",
        help="hurt pulls that are under way, too: their holders, their KV, their clients, their "
        "blocks; a run in which none was hurt has failed (wants --pulls)",
    )
    line.add_argument("--folder", type=Path, help="for the model and the log; none is a new one")
    box = commands.add_parser("blackbox", help="hurt any OpenAI server whose pids are known")
    box.add_argument("--url", required=True)
    box.add_argument("--model", required=True)
    who = box.add_mutually_exclusive_group(required=True)
    who.add_argument("--pids", help="ROLE=PID,... of the workers: stopped and continued")
    who.add_argument("--pids-from", help="command that prints that; workers are killed, too")
    box.add_argument("--sampled", action="store_true", help="the server's answers to a seed recur")
    box.add_argument("--deadline", type=float, default=60.0, help="of a request, in seconds")
    for each in (line, box):
        each.add_argument("--requests", type=int, default=300)
        each.add_argument("--seed", type=int, default=1)
        each.add_argument("--every", type=int, default=40, help="requests between two faults")
        each.add_argument("--longest", type=float, default=8.0, help="seconds of a fault")
        each.add_argument("--questions", type=int, default=2000, help="different ones, at most")
        each.add_argument("--at-once", type=int, default=AT_ONCE)
    return top


def main(words: Sequence[str]) -> int:
    """Run a command; 1 if something did not hold."""
    top = parser()
    args = top.parse_args(words)
    if args.longest < 0.1:
        top.error(f"--longest: {args.longest:g}; 0.1 or more is allowed")
    for name in ("requests", "every", "questions", "at_once"):
        if getattr(args, name) < 1:
            top.error(f"--{name.replace('_', '-')}: {getattr(args, name)}; 1 or more is allowed")
    if args.command == "line" and args.aimed and not args.pulls:
        top.error("--aimed: nothing is pulled without --pulls; allowed with it alone")
    problems = _line(args) if args.command == "line" else _blackbox(args, top)
    print("all held" if not problems else f"{problems} problems; again: {_again(words)}")
    return 1 if problems else 0


def _again(words: Sequence[str]) -> str:
    return f"{Path(sys.executable).name} -m tests.chaos {' '.join(words)}"


def _schedule(args: argparse.Namespace, **more: object) -> Schedule:
    return make_schedule(
        args.seed,
        args.requests,
        questions=args.questions,
        every=args.every,
        longest=args.longest,
        **more,  # type: ignore[arg-type]
    )


def _blackbox(args: argparse.Namespace, top: argparse.ArgumentParser) -> int:
    try:
        pids = Pids.said_by(args.pids_from) if args.pids_from else Pids.fixed(args.pids)
    except ValueError as error:
        top.error(str(error))
    kinds = (Kind.STOP, Kind.KILL) if args.pids_from else (Kind.STOP,)
    schedule = _schedule(args, kinds=kinds, sampled=args.sampled, roles=pids.roles)
    target = Target(args.url, args.model, at_once=args.at_once, deadline=args.deadline)
    report, hand = run(target, schedule, pids)
    print(f"{len(hand.struck)} faults\n{report}")
    return len(report.problems)


def _line(args: argparse.Namespace) -> int:
    from tests.chaos.agents import TRANSPORT
    from tests.chaos.aim import moments_of
    from tests.chaos.chased import chased
    from tests.chaos.raised import raised
    from tests.small_model import write_small_model

    from tandem.hub import DEFAULT_MODEL, prepare

    folder = args.folder or Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not model.exists():
        write_small_model(prepare(DEFAULT_MODEL, progress=False).path, model)
    kinds = PROCESS_KINDS + (LINK_KINDS if args.links else ())
    kinds += (Kind.FLIP,) * args.bits + (Kind.CLOCK,) * args.clocks
    kinds += PULL_KINDS if args.aimed else ()
    schedule = _schedule(
        args,
        kinds=kinds,
        pulls=args.pulls,
        moments=moments_of(args.connector),
        agents=args.connector == TRANSPORT,
    )
    proxied = args.seed if args.links or args.aimed else None
    log = folder / "stack.log"
    with raised(model, log, args.connector, proxied=proxied, pulls=args.pulls) as line:
        target = Target(line.stack.url, MODEL, at_once=args.at_once)
        report, hand, said = asyncio.run(chased(target, schedule, line, aimed=args.aimed))
        print(*said, sep="\n")
        print(line.summary())
    print(f"{len(hand.struck)} faults, log in {folder}\n{report}")
    return len(report.problems)
