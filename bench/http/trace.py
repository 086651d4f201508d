"""Where a first token's time goes: python bench/http/trace.py --out FOLDER [--tokens 512 2048].

Starts ``tandem serve`` as run.py does, with marks around the functions on a first token's way
(marks/sitecustomize.py), and sends prompts one after the other. Client, router and worker share a
clock, so their marks make one row a request. Prints and writes, for each mark, the median ms since
the one before it and since the client sent. Marks and pauses change a first token by tenths of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from server import serving

from tandem.cli.bench.client import Target, send
from tandem.cli.bench.load import Ask

HERE = Path(__file__).parent
WRITE_SECONDS = 1.0
"""How often a traced process writes its marks, as marks/sitecustomize.py has it."""
FIRST_ID, LAST_ID = 1000, 30_000
Mark = tuple[int, str]
"""Nanoseconds of the machine's monotonic clock, and what happened."""


def served(url: str) -> str:
    """The model's name."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


async def ask(url: str, model: str, tokens: int, count: int, pause: float) -> list[list[Mark]]:
    """Prompts in turn; when each was sent and when its first token was there."""
    target = Target(f"{url}/v1/completions", model, {}, {"temperature": 0.0, "ignore_eos": True})
    numbers, seen = np.random.default_rng(tokens), []
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as session:
        for _ in range(count):
            await asyncio.sleep(pause)
            prompt = numbers.integers(FIRST_ID, LAST_ID, tokens).tolist()
            record = await send(session, target, Ask(prompt, 1), 0.0)  # perf_counter's zero
            if record.error is not None:
                raise RuntimeError(record.error)
            times = (record.sent_at, record.times[0])
            sent, first = (round(each * 1e9) for each in times)
            seen.append([(sent, "client sends"), (first, "client has a token")])
    return seen


def rows_of(requests: list[list[Mark]], marks: list[Mark]) -> list[list[tuple[float, str]]]:
    """For each request all marks from its sending to its first token: ms after the sending, and
    a name with its number where it comes again."""
    rows = []
    for (sent, begin), (first, end) in requests:
        met: Counter[str] = Counter()
        inside = [(sent, begin), *(each for each in marks if sent < each[0] < first), (first, end)]
        row = []
        for at, name in inside:
            met[name] += 1
            row.append(((at - sent) / 1e6, name if met[name] == 1 else f"{name} {met[name]}"))
        rows.append(row)
    return rows


def read(folder: Path) -> list[Mark]:
    """All processes' marks, the oldest first."""
    lines = (line for file in folder.glob("*.txt") for line in file.read_text().splitlines())
    pairs = (line.split(" ", 1) for line in lines)
    return sorted((int(at), name) for at, name in pairs)


def summary(rows: list[list[tuple[float, str]]]) -> list[dict[str, Any]]:
    """Marks that most requests have, in the order of their medians."""
    after: dict[str, list[float]] = {}
    since: dict[str, list[float]] = {}
    for row in rows:
        before = 0.0
        for at, name in row:
            after.setdefault(name, []).append(at)
            since.setdefault(name, []).append(at - before)
            before = at
    common = [name for name, seen in after.items() if 2 * len(seen) > len(rows)]
    return [
        {
            "mark": name,
            "after_ms": round(statistics.median(after[name]), 3),
            "since_ms": round(statistics.median(since[name]), 3),
        }
        for name in sorted(common, key=lambda each: statistics.median(after[each]))
    ]


def main() -> None:
    """Serve, ask, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.004, help="seconds between requests")
    parser.add_argument("--model", help="served instead of Qwen3-8B's shapes")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--port", type=int, default=8124)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        model, flags = args.model, args.worker_flags
        if model is None:
            import model as shapes

            model = str(shapes.write(Path(place) / "qwen3-8b"))
            flags = f"--load-format dummy {flags}"
        noted = Path(place) / "marks"
        noted.mkdir()
        path = os.pathsep.join([str(HERE / "marks"), os.environ.get("PYTHONPATH", "")])
        environment = {"TANDEM_MARKS": str(noted), "PYTHONPATH": path}
        command = ["serve", "--model", model, f"--worker-flags={flags}"]
        found = {}
        with serving(command, args.port, args.out / "trace.log", environment) as server:
            for tokens in args.tokens:
                asked = ask(server.url, served(server.url), tokens, args.requests + 5, args.pause)
                found[tokens] = asyncio.run(asked)[5:]
            time.sleep(2 * WRITE_SECONDS)
        marks = read(noted)
    report = {tokens: summary(rows_of(requests, marks)) for tokens, requests in found.items()}
    (args.out / "trace.json").write_text(json.dumps(report, indent=1) + "\n")
    for tokens, lines in report.items():
        print(f"{tokens} tokens: ms after the client sent, ms since the mark before")
        for line in lines:
            print(f"{line['after_ms']:9.3f} {line['since_ms']:8.3f}  {line['mark']}")


if __name__ == "__main__":
    main()
