"""What prompts that come at once do to running streams: python bench/router/burst.py --out FILE.

A worker process replays frames (one a step, a token of each stream in it), the real router runs in
a process of its own, and this process reads: ``--streams`` streams run while ``--burst`` requests
with prompts of ``--tokens`` ids each are sent at once, again and again. Prints the longest gap of
the streams around each burst, beside the longest in as much time without one, and the router's CPU
time of a request. Both are of the machine, and of its other work; their difference is the router's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from router_overhead import cpu_seconds, replayed

AROUND = 0.4
"""Seconds from a burst on in which its gaps are looked for, and before it for the others."""


def request_bytes(prompt: list[int], tokens: int) -> bytes:
    """One request as it goes over the wire."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def read(port: int, request: bytes, times: list[float] | None) -> None:
    """A stream to its end; when each part of it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    rest = b""
    while b"data: [DONE]" not in rest:
        part = await reader.read(1 << 16)
        if not part:
            raise RuntimeError(f"the answer ends: {rest[-200:]!r}")
        if times is not None:
            times.append(time.monotonic())
        rest = (rest + part)[-64:]
    writer.close()


def longest(streams: list[list[float]], since: float, until: float) -> float:
    """Of all gaps that end in this time, in ms."""
    return 1e3 * max(
        (b - a for each in streams for a, b in itertools.pairwise(each) if since < b < until),
        default=0.0,
    )


async def measured(port: int, router: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    """Gaps around bursts and without, and the CPU time of a request beyond that of the streams."""
    draws = random.Random(1)
    streams: list[list[float]] = [[] for _ in range(args.streams)]
    steps = int((args.rounds + 2) * 1.0 / (args.interval_ms / 1e3))
    asked = request_bytes(draws.choices(range(1000, 9000), k=64), steps)
    tasks = [asyncio.create_task(read(port, asked, each)) for each in streams]
    await asyncio.sleep(2.0)
    beside, alone, costs = [], [], []
    for _ in range(args.rounds):
        burst = [
            request_bytes(draws.choices(range(1000, 9000), k=args.tokens), 2)
            for _ in range(args.burst)
        ]
        quiet = cpu_seconds(router)
        await asyncio.sleep(AROUND)
        began, spent = time.monotonic(), cpu_seconds(router)
        await asyncio.gather(*(read(port, each, None) for each in burst))
        await asyncio.sleep(max(0.0, began + AROUND - time.monotonic()))
        cost = (cpu_seconds(router) - spent) - (spent - quiet)
        costs.append(1e3 * cost / args.burst)
        beside.append(longest(streams, began, began + AROUND))
        alone.append(longest(streams, began - AROUND, began))
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "gap_with_burst_ms": [round(each, 1) for each in beside],
        "gap_without_ms": [round(each, 1) for each in alone],
        "cpu_ms_per_request": [round(each, 2) for each in costs],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--burst", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    with replayed(args.interval_ms) as (port, _, router):
        found = asyncio.run(measured(port, router, args))
    for name, values in found.items():
        print(f"{name}: median {statistics.median(values):g} ({', '.join(map(str, values))})")
    if args.out:
        asked = {name: value for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps(asked | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
