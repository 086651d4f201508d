"""Load generator: an open loop with arrival times, or a closed one with bounded concurrency.

One process reads some thousand pieces a second. Above that, ``--client-processes`` share the load,
so that the server is measured and not the client.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from multiprocessing.managers import SyncManager
from threading import Barrier

import aiohttp

from tandem.cli.bench.client import Record, Target, send
from tandem.cli.bench.load import Ask
from tandem.cli.children import be_killed_with
from tandem.link.descriptors import raise_descriptor_limit

_RUN_UP = 0.3
"""Seconds from the start of all processes to the start of the load."""
_UP_SECONDS = 60.0


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

    ``started`` is the start time (of ``time.perf_counter``) and the zero of all times. The default
    is now.
    """
    raise_descriptor_limit()
    gate = asyncio.Semaphore(bounds.max_concurrency or max(1, len(load)))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    limits = aiohttp.ClientTimeout(total=bounds.timeout)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, read_bufsize=1 << 20
    ) as session:
        # Looking through the load's tokens would stop every stream that is being timed.
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
    """Drive from several processes: each sends every n-th request, and they share concurrency
    evenly. All of them end with this process, so that none loads the server during a later
    measurement."""
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
    """Return the limits of one process."""
    whole = bounds.max_concurrency
    places = None if whole is None else whole // count + (number < whole % count)
    return Bounds(max_concurrency=places, timeout=bounds.timeout)


@dataclass(frozen=True, slots=True)
class _Start:
    """Agreement of processes on one start time of ``time.perf_counter``, a shared clock."""

    gate: Barrier
    said: MutableMapping[str, float]

    def agree(self) -> float:
        """Wait until all processes are ready. Return the start time."""
        if self.gate.wait(_UP_SECONDS) == 0:
            self.said["start"] = time.perf_counter() + _RUN_UP
        self.gate.wait(_UP_SECONDS)
        return self.said["start"]


def _part(
    target: Target, load: Sequence[Ask], bounds: Bounds, start: _Start
) -> tuple[list[Record], float]:
    """Drive one process's share of the load."""
    return asyncio.run(drive(target, load, bounds, done=lambda _: None, started=start.agree()))
