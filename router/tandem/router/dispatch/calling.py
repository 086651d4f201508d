"""A command to every worker, whatever its role, and one reply for all of theirs."""

from __future__ import annotations

import asyncio

from tandem.protocol.commands import Command, Reply, seconds_for
from tandem.router.workers.pool import WorkerPool

CALL_SECONDS = 10.0
"""A worker that moves no memory answers within this."""


async def call_all(pool: WorkerPool, command: Command) -> Reply:
    """Ok if every worker says so, values added up, with the words of those that failed, or else of
    all that have any. Raises RequestFailed when one does not answer
    in time."""
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
