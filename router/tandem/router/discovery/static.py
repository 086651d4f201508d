"""A fixed list of worker addresses, each looked up anew while nobody answers there.

ZMQ resolves a name again on each of its own retries; this starts over with a new socket now and
then, for the cases that it does not recover from by itself. A cluster's discovery is a sibling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.link.session import LinkState
from tandem.router.workers.pool import WorkerPool

LOOK_AGAIN = 15.0
"""Seconds between two fresh starts of a link that is down."""


class StaticDiscovery:
    """``run`` until cancelled."""

    def __init__(self, pool: WorkerPool, endpoints: Sequence[str]) -> None:
        self._pool = pool
        self._endpoints = tuple(dict.fromkeys(endpoints))

    async def run(self, interval: float = LOOK_AGAIN) -> None:
        """Add all addresses, then look after those that stay down for a whole ``interval``."""
        for endpoint in self._endpoints:
            self._pool.add(endpoint)
        down: set[str] = set()
        while True:
            await asyncio.sleep(interval)
            still = {e for e, state in self._pool.links().items() if state is LinkState.DOWN}
            for endpoint in still & down & set(self._endpoints):
                self._pool.reconnect(endpoint)
            down = still
