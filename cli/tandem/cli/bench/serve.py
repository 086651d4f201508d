"""`tandem bench serve`: measures a server with an OpenAI API, by rate, concurrency or trace."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import (
    Callable,
    Mapping,
    MutableMapping,
    Sequence,
)
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing.context import SpawnContext
from multiprocessing.managers import SyncManager
from pathlib import Path
from threading import Barrier
from typing import Any

import aiohttp
import httpx
import numpy as np

from tandem.base.settings import (
    check_integer,
    check_optional_integer,
    setting,
)
from tandem.cli.bench.client import Record, Target, send
from tandem.cli.bench.load import Ask, LoadConfig, asks
from tandem.cli.inspect.explain import plain
from tandem.cli.serve import listening
from tandem.cli.serve.children import be_killed_with
from tandem.cli.settings.command import check_place, parse
from tandem.cli.settings.flags import Section
from tandem.link.sockets import raise_descriptor_limit
from tandem.protocol.errors import InvalidParameter

ENDPOINT = "/v1/completions"
METRICS = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = (90, 99)
NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Return bounds in ms by metric, from ``ttft:200`` and the like. Raises InvalidParameter."""
    bounds = {}
    for each in given:
        name, colon, value = each.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not colon:
            raise InvalidParameter("goodput", each, "ttft:MS, tpot:MS or e2el:MS")
        try:
            bounds[name] = float(value)
        except ValueError as error:
            raise InvalidParameter("goodput", each, "ttft:MS, tpot:MS or e2el:MS") from error
    return bounds


def summarize(
    records: Sequence[Record],
    seconds: float,
    *,
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Return the result that is printed and saved; times in milliseconds."""
    good = [record for record in records if record.error is None]
    tokens = sum(record.num_tokens for record in good)
    prompts = sum(record.num_prompt for record in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "duration": seconds,
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "request_throughput": len(good) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (prompts + tokens) / seconds,
        "max_concurrency_seen": _most_at_once(good),
    }
    if goodput:
        within = sum(_is_within(record, goodput) for record in good)
        result["request_goodput"] = within / seconds
        result["share_within_bounds"] = within / max(1, len(records))
    for name in METRICS:
        values = _values(good, name)
        if values.size:
            result |= _spread(name, values)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    return result | ({"errors": errors} if errors else {})


def _values(
    records: Sequence[Record], name: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    if name == "itl":
        found = [gap for record in records for gap in record.itl]
    elif name == "tpot":
        found = [record.tpot for record in records if record.tpot is not None]
    else:
        found = [record.ttft if name == "ttft" else record.e2e for record in records]
    return np.asarray(found, dtype=np.float64) * 1000


def _spread(
    name: str,
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> dict[str, float]:
    spread = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for rank in _PERCENTILES:
        spread[f"p{rank}_{name}_ms"] = float(np.percentile(values, rank))
    return spread


def _is_within(record: Record, bounds: Mapping[str, float]) -> bool:
    tpot = record.tpot
    if tpot is None:  # a single token has no time between tokens that could be too long
        tpot = 0.0 if record.num_tokens == 1 else math.inf
    times = {"ttft": record.ttft, "tpot": tpot, "e2el": record.e2e}
    return all(1000 * times[name] <= bound for name, bound in bounds.items())


def _most_at_once(records: Sequence[Record]) -> int:
    steps = [(record.sent_at, 1) for record in records]
    steps += [(record.times[-1], -1) for record in records]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


_RUN_UP = 0.3
"""Seconds from the start of all processes to the start of the load."""
_UP_SECONDS = 60.0
_REQUEST_SECONDS = 3600.0
"""Deadline of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of all requests of a load."""

    max_concurrency: int | None
    timeout: float
    """Time limit of one request, in seconds."""


async def drive(
    target: Target,
    load: Sequence[Ask],
    bounds: Bounds,
    *,
    done: Callable[[Record], None],
    started: float | None = None,
) -> tuple[list[Record], float]:
    """Return all records in order of arrival, and the duration in seconds.

    ``started``: time of ``time.perf_counter`` to which all times refer; by default now.
    """
    raise_descriptor_limit()
    gate = asyncio.Semaphore(bounds.max_concurrency or max(1, len(load)))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    limits = aiohttp.ClientTimeout(total=bounds.timeout)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, read_bufsize=1 << 20
    ) as session:
        # A collection would stop the timed streams.
        gc.collect()
        gc.freeze()
        zero = time.perf_counter() if started is None else started
        await asyncio.sleep(max(0.0, zero - time.perf_counter()))

        async def one(ask: Ask) -> Record:
            if ask.at is not None:
                await asyncio.sleep(max(0.0, zero + ask.at - time.perf_counter()))
            async with gate:
                record = await send(session, target, ask, zero)
            done(record)
            return record

        records = await asyncio.gather(*(one(ask) for ask in load))
        seconds = time.perf_counter() - zero
        gc.unfreeze()
        return list(records), seconds


def drive_in_processes(
    target: Target,
    load: Sequence[Ask],
    bounds: Bounds,
    *,
    processes: int,
    done: Callable[[Record], None],
) -> tuple[list[Record], float]:
    """Drive from several processes: each sends every n-th request.

    They share concurrency evenly, and end with this process.
    """
    count = min(processes, len(load), bounds.max_concurrency or len(load))
    spawn = multiprocessing.get_context("spawn")
    with (
        _manager(spawn) as manager,
        ProcessPoolExecutor(
            count, mp_context=spawn, initializer=be_killed_with, initargs=(os.getpid(),)
        ) as pool,
    ):
        start = _Start(manager.Barrier(count), manager.dict())
        parts = [
            pool.submit(_part, target, load[n::count], _share(bounds, n, count), start)
            for n in range(count)
        ]
        for part in as_completed(parts):
            for record in part.result()[0]:
                done(record)
    seconds = max(part.result()[1] for part in parts)
    records = [record for part in parts for record in part.result()[0]]
    return sorted(records, key=lambda record: record.sent_at), seconds


def _manager(spawn: SpawnContext) -> SyncManager:
    manager = SyncManager(ctx=spawn)
    manager.start(be_killed_with, (os.getpid(),))
    return manager


def _share(bounds: Bounds, number: int, count: int) -> Bounds:
    whole = bounds.max_concurrency
    places = None if whole is None else whole // count + (number < whole % count)
    return Bounds(max_concurrency=places, timeout=bounds.timeout)


@dataclass(frozen=True, slots=True)
class _Start:
    """Agreement of processes on a start time of ``time.perf_counter``."""

    gate: Barrier
    shared: MutableMapping[str, float]

    def agree(self) -> float:
        if self.gate.wait(_UP_SECONDS) == 0:
            self.shared["start"] = time.perf_counter() + _RUN_UP
        self.gate.wait(_UP_SECONDS)
        return self.shared["start"]


def _part(
    target: Target, load: Sequence[Ask], bounds: Bounds, start: _Start
) -> tuple[list[Record], float]:
    return asyncio.run(drive(target, load, bounds, done=lambda _: None, started=start.agree()))


_COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "max_concurrency_seen": "Most requests at once",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests per second",
    "request_goodput": "Requests per second within the bounds",
    "output_throughput": "Output tokens per second",
    "total_token_throughput": "Input and output tokens per second",
}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    counts = Table(show_header=False, box=None, padding=(0, 2))
    for key, label in _COUNTS.items():
        if key in result:
            value = result[key]
            counts.add_row(label, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
    console.print(counts)
    ranks = [key.split("_")[0] for key in result if key[0] == "p" and key.endswith("_ttft_ms")]
    latency = Table("ms", "mean", "median", *ranks, padding=(0, 1))
    for name in METRICS:
        if f"mean_{name}_ms" in result:
            keys = [f"{each}_{name}_ms" for each in ("mean", "median", *ranks)]
            latency.add_row(NAMES[name], *(f"{result[key]:,.2f}" for key in keys))
    console.print(latency)
    for message, count in result.get("errors", {}).items():
        console.print(Text.assemble((f"{count} x", "red"), " ", plain(message)))


def save(path: Path, result: dict[str, Any], records: Sequence[Record]) -> None:
    """Write the JSON with the times of every request."""
    requests = [
        {
            "prompt_tokens": record.num_prompt,
            "output_tokens": record.num_tokens,
            "sent_at": record.sent_at,
            "times": record.times,
            "error": record.error,
        }
        for record in records
    ]
    content = {**result, "requests": requests}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Server, pace, and what to show."""

    base_url: str = setting("http://127.0.0.1:8000", "Server, without /v1.")
    model: str | None = setting(None, "Model to request. Default: the server's first.")
    api_key: str | None = setting(None, "Bearer token.")
    max_concurrency: int | None = setting(
        None, "Maximum number of concurrent requests. Default: no limit.", unit="requests"
    )
    client_processes: int = setting(
        1, "Client processes. One reads some thousand tokens per second."
    )
    num_warmups: int = setting(1, "Number of requests before the measured ones.", unit="requests")
    ignore_eos: bool = setting(True, "Request answers of exactly --random-output-len tokens.")
    goodput: tuple[str, ...] = setting(
        (), "Bound in milliseconds, such as ttft:200, tpot:50 or e2el:5000; repeatable."
    )
    result: str | None = setting(None, "JSON file to write, with the times of every request.")

    def __post_init__(self) -> None:
        check_place("result", self.result)
        check_optional_integer("max_concurrency", self.max_concurrency, 1)
        check_integer("client_processes", self.client_processes, 1, 64)
        check_integer("num_warmups", self.num_warmups, 0)
        parse_goodput(self.goodput)


def run(argv: list[str]) -> int:
    """Measure. Return 1 if a request failed."""
    sections = [Section("Server and results", ServeConfig), Section("Load", LoadConfig)]
    given: dict[type, dict[str, Any]] = parse("bench serve", __doc__ or "", sections, argv)
    config, load = ServeConfig(**given[ServeConfig]), LoadConfig(**given[LoadConfig])
    target = _target(config)
    result, records = measure(config, load, target)
    if config.result:
        save(Path(config.result), result, records)
    show(result)
    return 1 if result["failed"] else 0


def measure(
    config: ServeConfig, load: LoadConfig, target: Target
) -> tuple[dict[str, Any], list[Record]]:
    """Warm up, send the load, and sum it up."""
    bounds = Bounds(max_concurrency=config.max_concurrency, timeout=_REQUEST_SECONDS)
    if config.num_warmups:
        warm = asks(_warming(load, config.num_warmups))
        asyncio.run(drive(target, warm, bounds, done=lambda _: None))
    todo = asks(load)
    with _Progress(len(todo)) as progress:
        if config.client_processes > 1:
            records, seconds = drive_in_processes(
                target, todo, bounds, processes=config.client_processes, done=progress.step
            )
        else:
            records, seconds = asyncio.run(drive(target, todo, bounds, done=progress.step))
    result = summarize(records, seconds, goodput=parse_goodput(config.goodput))
    result["settings"] = {**asdict(load), **_public(config), "model": target.model}
    return result, records


def _warming(load: LoadConfig, count: int) -> LoadConfig:
    seed = load.seed + (1 << 32)
    return replace(load, num_prompts=count, seed=seed, request_rate=0.0, dataset_path=None)


def _public(config: ServeConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name != "api_key"}


def _target(config: ServeConfig) -> Target:
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    model = config.model or _first_model(config, headers)
    body: dict[str, Any] = {"temperature": 0.0}
    if config.ignore_eos:
        body["ignore_eos"] = True
    return Target(config.base_url.rstrip("/") + ENDPOINT, model, headers, body)


def _first_model(config: ServeConfig, headers: dict[str, str]) -> str:
    url = config.base_url.rstrip("/") + "/v1/models"
    try:
        with httpx.Client(mounts=listening.mounts(url), timeout=10) as client:
            answer = client.get(url, headers=headers)
        answer.raise_for_status()
        name: str = answer.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        problem = f"a server that lists its models ({error})"
        raise InvalidParameter("base_url", config.base_url, problem) from error
    return name


class _Progress:
    """A bar on the error stream, so that the table may be piped."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        self._bar = Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, _: Record) -> None:
        self._bar.advance(self._task)
