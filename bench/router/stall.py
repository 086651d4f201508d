"""How long one request holds up all others: `/health` and running streams beside nasty requests.

Starts a real line (`tandem up`, SmolLM2 on the CPU), keeps streams running, sends each request of
``nasty`` alone, and reports the slowest answer of `/health` and the longest gap in any stream while
it was looked at and answered. Aims, on two idle cores: 300 and 500 ms.

    .venv/bin/python bench/router/stall.py --streams 16 --fuzz 40

On two cores the workers compute on the same cores as the router: ``--worker-flags`` takes, say,
``--max-num-mixed-tokens 64`` to tell their part from the router's. ``--quiet`` seconds are measured
first without any request.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx
from nasty import Nasty, named, of_any_size

from tandem.cli.ports import free_ports

READY_SECONDS = 300.0
ANSWER_SECONDS = 120.0
AIMS = (0.3, 0.5)


@dataclass(slots=True)
class Watch:
    """The longest of each since ``reset``, in seconds."""

    health: float = 0.0
    gap: float = 0.0
    tokens: int = 0
    broken: list[str] = field(default_factory=list)
    """What went wrong beside the request."""

    def reset(self) -> None:
        """Look anew."""
        self.health = self.gap = 0.0
        self.tokens = 0
        self.broken = []


async def ask_health(client: httpx.AsyncClient, watch: Watch) -> None:
    """Without end, twenty times a second."""
    while True:
        began = time.perf_counter()
        try:
            (await client.get("/health")).raise_for_status()
        except httpx.HTTPError as error:
            watch.broken.append(f"/health: {error!r}")
        watch.health = max(watch.health, time.perf_counter() - began)
        await asyncio.sleep(0.05)


async def keep_streaming(client: httpx.AsyncClient, watch: Watch, number: int) -> None:
    """One stream after the other; the gap from a stream's first token on counts."""
    body = {"prompt": f"Story {number}:", "max_tokens": 1_000, "stream": True, "ignore_eos": True}
    while True:
        last: float | None = None
        try:
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                async for line in stream.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if '"error"' in line:
                        watch.broken.append(line)
                    watch.tokens += 1
                    if last is not None:
                        watch.gap = max(watch.gap, now - last)
                    last = now
        except httpx.HTTPError as error:
            watch.broken.append(f"stream {number}: {error!r}")
            await asyncio.sleep(0.5)


async def send(client: httpx.AsyncClient, nasty: Nasty) -> tuple[str, float]:
    """Its status and how long it took."""
    _, path, body = nasty
    began = time.perf_counter()
    try:
        status = str((await client.post(path, content=body)).status_code)
    except httpx.HTTPError as error:
        status = type(error).__name__
    return status, time.perf_counter() - began


async def measure(url: str, nasty: Iterable[Nasty], *, streams: int, quiet: float) -> list[str]:
    """A line per request; those beyond the aims."""
    watch, slow = Watch(), []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits) as client:
        tasks = [asyncio.create_task(ask_health(client, watch))]
        tasks += [asyncio.create_task(keep_streaming(client, watch, n)) for n in range(streams)]
        await asyncio.sleep(5.0)  # until all stream
        watch.reset()
        await asyncio.sleep(quiet)
        report("(nothing)", "-", quiet, watch)
        for each in nasty:
            watch.reset()
            status, seconds = await send(client, each)
            await asyncio.sleep(0.3)  # what it leaves behind counts
            report(each[0], status, seconds, watch)
            if watch.health > AIMS[0] or watch.gap > AIMS[1] or watch.broken:
                slow.append(each[0])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return slow


def report(name: str, status: str, seconds: float, watch: Watch) -> None:
    """One row."""
    rate = watch.tokens / seconds if seconds else 0.0
    print(
        f"{name:<28.28} {status:>12} {seconds:7.2f} s   health {watch.health * 1000:6.0f} ms   "
        f"gap {watch.gap * 1000:6.0f} ms   {rate:6.0f} tok/s   broken {len(watch.broken)}",
        flush=True,
    )
    for each in watch.broken:
        print(f"    {each}", flush=True)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the line serves."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("the line did not become ready")


def main() -> int:
    """Measure, and say what was beyond the aims; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--fuzz", type=int, default=0, help="requests of random sizes, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quiet", type=float, default=5.0)
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--only", default="", help="requests whose name has this in it")
    options = parser.parse_args()
    (port,) = free_ports(1)
    flags = ["--port", str(port), "--prefill", str(options.prefill)]
    flags += [f"--worker-flags={options.worker_flags}"]
    flags += ["--router-flags=--trust-request-chat-template"]
    line = subprocess.Popen([sys.executable, "-m", "tandem.cli", "up", *flags])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, line)
        nasty = [each for each in named() if options.only in each[0]]
        nasty += of_any_size(options.seed, options.fuzz)
        slow = asyncio.run(measure(url, nasty, streams=options.streams, quiet=options.quiet))
    finally:
        line.send_signal(signal.SIGINT)
        line.wait(60)
    print(
        f"beyond 300 ms of /health, 500 ms between tokens, or broken: {', '.join(slow) or 'none'}"
    )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
