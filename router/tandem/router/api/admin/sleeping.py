"""Endpoints that put the fleet to sleep and wake it, with vLLM's query parameters.

They require an administration key. The answer is sent when placement has the new state.
"""

from __future__ import annotations

import asyncio
import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.commands import MAX_SLEEP_WAIT_S, SLEEP_LEVELS, Reply, SleepMode, SleepTag
from tandem.protocol.errors import InvalidParameter, TandemError
from tandem.router.api.openai.service import service_of
from tandem.router.endpoints import Routes
from tandem.router.workers.pool import WorkerPool

routes = Routes("administration")

USUAL_LEVEL = "1"
USUAL_WAIT_S = "60"
"""Default of ``timeout``."""
BEAT_SECONDS = 10.0
"""Deadline of the beat that reports the new state."""


@routes.post("/sleep")
async def sleep(request: Request) -> Response:
    """Free the memory of every worker, or of none.

    ``level`` 1 keeps weights in host memory, 2 drops them; ``mode`` abort ends running requests,
    wait waits up to ``timeout`` seconds. 503 if a worker has to stay awake.
    """
    _check_names(request, "level", "mode", "timeout")
    level = request.query_params.get("level", USUAL_LEVEL)
    mode = request.query_params.get("mode", SleepMode.ABORT)
    timeout = request.query_params.get("timeout", USUAL_WAIT_S)
    if level not in map(str, SLEEP_LEVELS):
        raise InvalidParameter("level", level, f"one of {', '.join(map(str, SLEEP_LEVELS))}")
    if mode not in set(SleepMode):
        allowed = f"one of {', '.join(SleepMode)}: requests cannot keep dropped KV"
        raise InvalidParameter("mode", mode, allowed)
    seconds = _seconds(timeout)
    pool = _pool(request)
    if not pool.workers:
        return _answer(Reply(id=0, ok=False, message="no worker is up"))
    awake = not any(worker.sleeps for worker in pool.workers.values())
    try:
        reply = await service_of(request).llm.sleep(int(level), mode, seconds)
    except TandemError:
        if awake:
            await _until(pool, sleeping=False)
        raise
    if reply.ok or awake:  # a worker that was woken again is awake for placement, too
        await _until(pool, sleeping=reply.ok)
    return _answer(reply)


@routes.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Restore the memory of every worker: all of it, or the parts in ``tags``.

    503 if one fails and continues to sleep.
    """
    _check_names(request, "tags")
    tags = request.query_params.getlist("tags")
    for tag in tags:
        if tag not in set(SleepTag):
            raise InvalidParameter("tags", tag, f"some of {', '.join(SleepTag)}")
    reply = await service_of(request).llm.wake_up(tags)
    if reply.ok and not reply.values.get("asleep"):
        await _until(_pool(request), sleeping=False)
    return _answer(reply)


@routes.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Return whether every worker sleeps, at least in part."""
    _check_names(request)
    return _json({"is_sleeping": await service_of(request).llm.is_sleeping()})


async def _until(pool: WorkerPool, *, sleeping: bool) -> None:
    """Wait until every worker's beat reports the state. A silent worker counts as lost."""
    deadline = asyncio.get_running_loop().time() + BEAT_SECONDS
    while any(worker.sleeps is not sleeping for worker in pool.workers.values()):
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return
        await pool.wait_change(left)


def _pool(request: Request) -> WorkerPool:
    pool: WorkerPool = request.app.state.fleet.pool
    return pool


def _check_names(request: Request, *names: str) -> None:
    for name, value in request.query_params.items():
        if name not in names:
            allowed = f"only {', '.join(names)}" if names else "no query parameters"
            raise InvalidParameter(name[:80], value, allowed)


def _seconds(given: str) -> float:
    try:
        seconds = float(given[:32])
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SLEEP_WAIT_S:
        raise InvalidParameter("timeout", given, f"seconds from 0 to {MAX_SLEEP_WAIT_S:g}")
    return seconds


def _answer(reply: Reply) -> Response:
    content = {
        "ok": reply.ok,
        "message": reply.message,
        "workers": int(reply.values.get("engines", 0)),
        "asleep": int(reply.values.get("asleep", 0)),
        "freed_bytes": int(reply.values.get("freed_bytes", 0)),
    }
    return _json(content, status=200 if reply.ok else 503)


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
