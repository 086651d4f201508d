"""Sends a load: an open loop at its times of arrival, or a closed one with so many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from tandem.cli.bench.client import Record, Target, send
from tandem.cli.bench.load import Ask


async def drive(
    target: Target,
    load: Sequence[Ask],
    *,
    max_concurrency: int | None,
    timeout: float,
    done: Callable[[Record], None],
) -> tuple[list[Record], float]:
    """All records in the order of arrival, and the seconds that it took."""
    gate = asyncio.Semaphore(max_concurrency or max(1, len(load)))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    limits = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, read_bufsize=1 << 20
    ) as session:
        started = time.perf_counter()

        async def one(ask: Ask) -> Record:
            if ask.at is not None:
                await asyncio.sleep(max(0.0, started + ask.at - time.perf_counter()))
            async with gate:
                record = await send(session, target, ask, started)
            done(record)
            return record

        records = await asyncio.gather(*(one(ask) for ask in load))
        return list(records), time.perf_counter() - started
