"""Periodic reconnects of links that stay down, each with a new socket. Both discoveries do so.

ZMQ resolves a name again on each of its own retries, and there are cases that it does not recover
from by itself. A worker that is known under two addresses has a link at one, and the other is
parked (``WorkerPool``). Once the first does not answer, the second is tried from here.
"""

from __future__ import annotations

import asyncio

from tandem.link.session import LinkState
from tandem.router.workers.pool import WorkerPool

LOOK_AGAIN = 15.0
"""Seconds between two fresh starts of a link that is down."""


async def look_again(pool: WorkerPool, interval: float) -> None:
    """Reconnect the addresses that are down for a whole ``interval`` (seconds), until cancelled.

    Not at once: on two addresses of one worker both would send HELLO, and end each other's links.
    """
    down: set[str] = set()
    while True:
        await asyncio.sleep(interval)
        still = {each for each, state in pool.links().items() if state is LinkState.DOWN}
        for endpoint in still & down:
            pool.reconnect(endpoint)
        down = still
