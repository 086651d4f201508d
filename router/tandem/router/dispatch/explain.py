"""The last placements with all their numbers, and the errors of their forecasts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.router.dispatch.attempt import Attempt, Explained, Leg
from tandem.router.dispatch.job import Job
from tandem.router.dispatch.retry_policy import AttemptFailure, ReaderTooSlow
from tandem.router.metrics import RouterMetrics
from tandem.router.placement.forecast import Forecast, PullPlan
from tandem.router.tenant import Tenant
from tandem.router.workers.rates import Naps


def raise_if_non_retryable(job: Job) -> None:
    """Raise the error that ends the request, if it cannot be retried."""
    retry_policy = job.retry_policy
    if job.expired:
        raise too_late(job)
    if retry_policy.non_retryable is not None:
        raise RequestRefused(retry_policy.non_retryable)
    if retry_policy.exhausted:
        raise no_place(job)
    last = retry_policy.failures[-1].refusal if retry_policy.failures else None
    if last is not None and last.code is RefusalCode.EXPIRED:
        raise too_late(job)


_LEAVES = {str(cause): cause for cause in (FailCause.ASLEEP, FailCause.DRAINING)}
"""Causes for refusals of a request on which other workers have worked."""


def worth_waiting(job: Job, *, anyone_up: bool) -> bool:
    """Return whether a worker that comes up could take the request."""
    if job.retry_policy.unsupported is not None:
        return False
    if any(_is_gone(failure) for failure in job.retry_policy.failures):
        return True
    return not anyone_up and not job.retry_policy.only_capacity


def _is_gone(failure: AttemptFailure) -> bool:
    refused = failure.refusal is not None and failure.refusal.code is RefusalCode.DRAINING
    return refused or failure.cause in (FailCause.WORKER_LOST, FailCause.DRAINING)


def no_place(job: Job) -> RequestRefused | RequestFailed:
    """Return the error of a request without a possible worker."""
    retry_policy = job.retry_policy
    if retry_policy.unsupported is not None:
        return RequestRefused(retry_policy.unsupported)
    if not retry_policy.failures:
        return RequestFailed(FailCause.WORKER_LOST, "no worker that could take it is up")
    if retry_policy.only_asleep:
        return asleep()
    last = retry_policy.failures[-1]
    if retry_policy.only_capacity and last.refusal is not None:
        return RequestRefused(last.refusal)
    cause = last.cause or _LEAVES.get(last.word, FailCause.CAPACITY)
    count = len(retry_policy.failures)
    return RequestFailed(
        cause, f"no worker could finish it in {count} attempts; last: {last}", retry_policy.reasons
    )


def asleep() -> RequestRefused:
    """Return the refusal if every possible worker sleeps."""
    return RequestRefused(Refusal(code=RefusalCode.ASLEEP, message="every worker is asleep"))


def too_late(job: Job) -> RequestFailed:
    """Return the error of a passed deadline."""
    return DeadlinePassed(
        FailCause.TIMEOUT, "the request's deadline passed", job.retry_policy.reasons
    )


KEPT = 256


class Explanations:
    """Latest ``KEPT`` attempts. Used in the loop's thread."""

    def __init__(self) -> None:
        self._latest: deque[Explained] = deque(maxlen=KEPT)

    def sent(self, request: str, num_prompt: int, attempt: Attempt, *, tenant: str = "") -> None:
        explained = Explained(request, attempt.number, num_prompt, attempt.placement, tenant)
        attempt.explained = explained
        self._latest.append(explained)

    def spoke(self, attempt: Attempt, leg: Leg, metrics: RouterMetrics) -> None:
        """Record the times of a leg's first output, and the forecast's error."""
        explained, pair = attempt.explained, attempt.placement.pair
        if explained is None:
            return
        came = attempt.received_at if leg.came_at is None else leg.came_at
        if explained.ttft is None:
            explained.ttft = seconds = came - attempt.started_at
            forecast = explained.placement.forecast
            if forecast is not None:
                metrics.forecast(forecast.way, abs(seconds - forecast.ttft))
        elif pair is not None and not leg.is_prefill:
            times = [each.came_at for each in attempt.legs if each.came_at is not None]
            explained.second = came - min(times, default=came)

    def to_json(self, reader: Tenant) -> list[dict[str, Any]]:
        """Return the attempts that ``reader`` may see, the latest first."""
        return [_attempt(each) for each in reversed(self._latest) if reader.may_read(each.tenant)]


def _attempt(explained: Explained) -> dict[str, Any]:
    placement = explained.placement
    return {
        "request": explained.request,
        "attempt": explained.attempt,
        "prompt_tokens": explained.num_prompt,
        "rule": placement.rule,
        "ttft_s": explained.ttft,
        "second_s": explained.second,
        "ways": [_way(each, chosen=each is placement.forecast) for each in placement.considered],
    }


def _way(forecast: Forecast, *, chosen: bool) -> dict[str, Any]:
    return {
        "way": forecast.way,
        "worker": forecast.worker.hex(),
        "prefill": None if forecast.prefill is None else forecast.prefill.hex(),
        "ttft_s": forecast.ttft,
        "second_s": forecast.second,
        "answers_s": forecast.answers,
        "missing": forecast.missing,
        "cost_s": forecast.cost,
        "chosen": chosen,
        "pull": None if forecast.pull is None else _pull(forecast.pull),
    }


def _pull(plan: PullPlan) -> dict[str, Any]:
    return {
        "holder": plan.holder.hex(),
        "prefix_tokens": plan.num_tokens,
        "tokens": plan.tokens,
        "pull_s": plan.seconds,
        "compute_s": plan.compute_s,
        "budget_s": plan.budget_s,
    }


CLOCKS = 0.1
"""Seconds by which a worker's clock may be ahead at a request's deadline."""
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
    """Maximum unread bytes of one answer from one sweep to the next."""
    total_backlog: int = 256 << 20


def check_deadlines(job: Job, attempt: Attempt) -> AttemptFailure | None:
    """Return the attempt's failure; raise if the request has ended. Call after reading."""
    if job.expired:
        raise too_late(job)
    if job.given_up:
        raise ReaderTooSlow(
            FailCause.CAPACITY, "given up: too much of the answer waited to be read"
        )
    return attempt.given_up


def raise_if_too_late(job: Job, failure: AttemptFailure | None, now: float) -> None:
    """Raise if a worker timed out because of the request's deadline."""
    if failure is None or failure.cause is not FailCause.TIMEOUT:
        return
    if job.expired or job.deadline - now < CLOCKS:
        raise too_late(job)


async def sweep(
    jobs: Callable[[], Collection[Job]], limits: DispatchLimits, tidy: Callable[[], None]
) -> None:
    """Give up attempts of silent workers, and answers with too much unread.

    Runs until cancelled; calls ``tidy`` each time.
    """
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
