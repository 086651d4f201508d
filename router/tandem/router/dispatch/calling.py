"""Sends a command to every worker, whatever its role, and merges the replies."""

from __future__ import annotations

import asyncio

from tandem.protocol.commands import Command, Reply, seconds_for
from tandem.router.workers.pool import WorkerPool

CALL_SECONDS = 10.0
"""Seconds within which a worker that moves no memory answers."""


async def call_all(pool: WorkerPool, command: Command) -> Reply:
    """Return ok if every worker does, values added up, and the messages of the failed workers, or
    else of all. Raises RequestFailed if one does not answer in time."""
    workers = list(pool.workers.values())
    seconds = seconds_for(command, CALL_SECONDS)
    replies = await asyncio.gather(
        *(worker.connection.call(command, seconds) for worker in workers)
    )
    values: dict[str, float] = {}
    for reply in replies:
        for name, value in reply.values.items():
            values[name] = values.get(name, 0.0) + value
    ok = all(reply.ok for reply in replies)
    said = [
        f"{worker.name}: {reply.message}"
        for worker, reply in zip(workers, replies, strict=True)
        if not reply.ok or (ok and reply.message)
    ]
    return Reply(id=command.id, ok=ok, message="; ".join(said), values=values)
