"""Ends of requests without a possible attempt, and whether to wait for a worker."""

from __future__ import annotations

from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.router.dispatch.failure import AttemptFailure
from tandem.router.dispatch.job import Job


def raise_if_non_retryable(job: Job) -> None:
    """Raise the error with which the request ends, if nothing more may or need be tried."""
    ladder = job.ladder
    if job.expired:
        raise too_late(job)
    if ladder.non_retryable is not None:
        raise RequestRefused(ladder.non_retryable)
    if ladder.exhausted:
        raise no_place(job)
    last = ladder.failures[-1].refusal if ladder.failures else None
    if last is not None and last.code is RefusalCode.EXPIRED:
        raise too_late(job)


_LEAVES = {str(cause): cause for cause in (FailCause.ASLEEP, FailCause.DRAINING)}
"""Causes for these refusals of a request that other workers have worked for."""


def worth_waiting(job: Job, *, anyone_up: bool) -> bool:
    """Return whether a worker that comes (back) could take the request. A lost or draining one
    usually has a successor, a full one has not."""
    if job.ladder.unsupported is not None:
        return False
    if any(_is_gone(failure) for failure in job.ladder.failures):
        return True
    return not anyone_up and not job.ladder.only_capacity


def _is_gone(failure: AttemptFailure) -> bool:
    refused = failure.refusal is not None and failure.refusal.code is RefusalCode.DRAINING
    return refused or failure.cause in (FailCause.WORKER_LOST, FailCause.DRAINING)


def no_place(job: Job) -> RequestRefused | RequestFailed:
    """Return the error of a request without a worker that could take it."""
    ladder = job.ladder
    if ladder.unsupported is not None:
        return RequestRefused(ladder.unsupported)
    if not ladder.failures:
        return RequestFailed(FailCause.WORKER_LOST, "no worker that could take it is up")
    if ladder.only_asleep:
        return asleep()
    last = ladder.failures[-1]
    if ladder.only_capacity and last.refusal is not None:
        return RequestRefused(last.refusal)
    cause = last.cause or _LEAVES.get(last.word, FailCause.CAPACITY)
    count = len(ladder.failures)
    return RequestFailed(
        cause, f"no worker could finish it in {count} attempts; last: {last}", ladder.reasons
    )


def asleep() -> RequestRefused:
    """Return the refusal if every worker that could take the request sleeps."""
    return RequestRefused(Refusal(code=RefusalCode.ASLEEP, message="every worker sleeps"))


def too_late(job: Job) -> RequestFailed:
    """Return the error of a passed deadline."""
    return DeadlinePassed(FailCause.TIMEOUT, "the request's deadline passed", job.ladder.reasons)
