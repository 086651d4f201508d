"""Coroutines that are started first and awaited later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def begun(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run a coroutine up to its first wait. Cancel it at the end of the block if it still waits,
    and return when it has ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.sleep(0)
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
