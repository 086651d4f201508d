"""A router with more workers than ZMQ's and the kernel's defaults allow."""

from __future__ import annotations

import asyncio
import gc

import pytest
from tests.many_links import NUM_LINKS, DecodeBatch, resident_kib
from tests.router.fake_cards import fake_card

from tandem.link.liveness import LinkTimes
from tandem.link.sockets import decode_to_worker
from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation, new_incarnation
from tandem.protocol.messages import Hello, Welcome, encode
from tandem.router.metrics import RouterMetrics
from tandem.router.workers.pool import WorkerPool


def welcome(me: Incarnation, payload: bytes) -> bytes | None:
    if not isinstance(decode_to_worker(payload), Hello):
        return None
    return encode(Welcome(fake_card(WorkerRole.DECODE, me)))


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_four_hundred_workers_are_linked() -> None:
    """Each link takes three of ZMQ's sockets and five descriptors; a silent one is given time."""
    decode_batch = DecodeBatch(welcome)
    times = LinkTimes(beat_interval=30.0, beat_timeout=120.0, stall_timeout=120.0)
    pool = WorkerPool(new_incarnation(), times=times, counter=RouterMetrics("fake"))
    try:
        pool.start(_Nobody())
        gc.collect()
        before = resident_kib()
        for endpoint in decode_batch.endpoints:
            pool.add(endpoint)
        async with asyncio.timeout(150):
            while len(pool.workers) < NUM_LINKS:
                await pool.wait_change(1.0)
        print(f"\n{(resident_kib() - before) / NUM_LINKS:.0f} KiB a link, both ends")
        assert len({worker.incarnation for worker in pool.workers.values()}) == NUM_LINKS
    finally:
        await pool.close()
        decode_batch.stop()


class _Nobody:
    def worker_up(self, worker: object) -> None: ...

    def worker_lost(self, worker: object, reason: str) -> None: ...

    def worker_blocks(self, worker: object, events: object) -> None: ...
