"""Sleep of all engines of a client, or of none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Protocol

from tandem.protocol.commands import MAX_SLEEP_WAIT_S, CommandName, Reply
from tandem.protocol.errors import InvalidParameter, TandemError

POLL_SECONDS = 0.05
"""Interval between two SLEEP commands while requests still run."""
ABORT_SECONDS = 10.0
"""Time in which aborted requests must have ended."""


class Call(Protocol):
    """Type of ``AsyncLLM.call``."""

    def __call__(self, name: CommandName, **args: str | float | bool) -> Awaitable[Reply]:
        """Run a command on every engine; values are summed."""
        ...


async def put_to_sleep(call: Call, *, level: int, mode: str, timeout: float) -> Reply:
    """Repeat the command until every engine sleeps. If one does not in time, all are woken up
    (unless some slept before), and the reply has the reason. Raises InvalidParameter for
    ``timeout``. Raises RequestFailed for an engine that does not answer; then, too, all are woken
    up."""
    if not 0 <= timeout <= MAX_SLEEP_WAIT_S:
        raise InvalidParameter("timeout", timeout, f"seconds from 0 to {MAX_SLEEP_WAIT_S:g}")
    loop = asyncio.get_running_loop()
    seconds = timeout if mode == "wait" else ABORT_SECONDS
    until = loop.time() + seconds
    before = (await call(CommandName.IS_SLEEPING)).values.get("asleep", 0)
    try:
        while True:
            left = max(0.0, until - loop.time())
            lasting = min(left + ABORT_SECONDS, MAX_SLEEP_WAIT_S)
            reply = await call(CommandName.SLEEP, level=level, mode=mode, timeout_s=lasting)
            if not reply.ok:
                break
            if 0 < reply.values.get("engines", 0) <= reply.values.get("asleep", 0):
                return reply
            if not left:
                message = f"requests did not come to their end within {seconds:g} s"
                reply = Reply(id=reply.id, ok=False, message=message)
                break
            await asyncio.sleep(min(POLL_SECONDS, left))
    except (TandemError, asyncio.CancelledError):
        with suppress(TandemError):  # who does not answer wakes up by itself
            await call(CommandName.WAKE_UP)
        raise
    if not before:
        await call(CommandName.WAKE_UP)
    return reply
