"""Deadlines of attempts with silent workers, and of requests.

The end of a request's own time is not a worker's fault: its workers have the same deadline by their
own clocks, and the first to report it is not blamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tandem.protocol.errors import FailCause
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.explain import too_late
from tandem.router.dispatch.failure import AttemptFailure, ReaderTooSlow
from tandem.router.dispatch.job import Job
from tandem.router.workers.rates import Naps

CLOCKS = 0.1
"""Seconds by which a worker's clock may be ahead of the router's at a request's deadline: rounding,
and the drift of two hosts' clocks in ten minutes."""
_SWEEP = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Limits in seconds, attempts per request, and unread bytes."""

    request_timeout: float = 600.0
    max_attempts: int = 3
    worker_wait: float = 5.0
    resume_wait: float = 30.0
    accept_timeout: float = 30.0
    progress_timeout: float = 120.0
    stream_backlog: int = 4 << 20
    """Bytes of one answer that its client may leave unread from one sweep to the next."""
    total_backlog: int = 256 << 20


def check_deadlines(job: Job, attempt: Attempt) -> AttemptFailure | None:
    """Raise if the request has ended, else return its attempt's failure; call after reading."""
    if job.expired:
        raise too_late(job)
    if job.given_up:
        raise ReaderTooSlow(
            FailCause.CAPACITY, "given up: too much of the answer waited to be read"
        )
    return attempt.given_up


def raise_if_too_late(job: Job, failure: AttemptFailure | None, now: float) -> None:
    """Raise if a worker timed out at the request's deadline, which then is the cause."""
    if failure is None or failure.cause is not FailCause.TIMEOUT:
        return
    if job.expired or job.deadline - now < CLOCKS:
        raise too_late(job)


async def sweep(
    jobs: Callable[[], Collection[Job]], limits: DispatchLimits, tidy: Callable[[], None]
) -> None:
    """Give up attempts of workers that are silent for too long, and answers of which too much stays
    unread. Runs until cancelled; calls ``tidy`` each time."""
    loop = asyncio.get_running_loop()
    naps = Naps(loop, _SWEEP)
    while True:
        late = await naps.sleep()
        tidy()
        now = loop.time()
        for job in list(jobs()):
            attempt = job.attempt
            if attempt is None:
                continue
            attempt.judge_reader(stood_still=late > _SWEEP)
            if job.tells_accepted and attempt.had_time(now):
                attempt.wake()
            if attempt.legs and attempt.given_up is None:
                attempt.overslept(late)
                failure = attempt.overdue(
                    now, accept=limits.accept_timeout, progress=limits.progress_timeout
                )
                if failure is not None:
                    attempt.give_up(failure)
