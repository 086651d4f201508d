"""A fixed list of worker addresses. A cluster's discovery is a sibling."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.discovery.again import LOOK_AGAIN, look_again
from tandem.router.workers.pool import WorkerPool


class StaticDiscovery:
    """``run`` until cancelled."""

    def __init__(self, pool: WorkerPool, endpoints: Sequence[str]) -> None:
        self._pool = pool
        self._endpoints = tuple(dict.fromkeys(endpoints))

    async def run(self, interval: float = LOOK_AGAIN) -> None:
        """Add all addresses, then reconnect those that stay down for a whole ``interval``."""
        for endpoint in self._endpoints:
            self._pool.add(endpoint)
        await look_again(self._pool, interval)
