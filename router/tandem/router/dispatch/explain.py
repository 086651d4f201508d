"""Observers of attempts: metrics, records and explanations; deadlines and errors of requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tandem.protocol.context import Route, Shape
from tandem.protocol.errors import (
    DeadlinePassed,
    FailCause,
    Refusal,
    RefusalCode,
    RequestFailed,
    RequestRefused,
)
from tandem.protocol.outputs import EngineCoreOutput, PooledOutput
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import Watch
from tandem.router.dispatch.admission import AdmissionRefused
from tandem.router.dispatch.attempt import Attempt, Explained, Leg
from tandem.router.dispatch.job import Job, Observer
from tandem.router.dispatch.retry_policy import AttemptFailure, ReaderTooSlow
from tandem.router.metrics import MISTAKES, RouterMetrics
from tandem.router.placement.forecast import Forecast, PullPlan
from tandem.router.tenant import Tenant
from tandem.router.workers.rates import Naps
from tandem.tracing.recording import AttemptRecord, Recording


def raise_if_non_retryable(job: Job) -> None:
    """Raise the error that ends the request, if it cannot be retried."""
    retry_policy = job.retry_policy
    if job.expired:
        raise too_late(job)
    if not retry_policy.failures:
        return
    if retry_policy.non_retryable is not None:
        raise RequestRefused(retry_policy.non_retryable)
    if retry_policy.exhausted:
        raise no_place(job)
    last = retry_policy.failures[-1].refusal
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
        return RequestFailed(FailCause.WORKER_LOST, "no worker that can serve it is connected")
    if retry_policy.only_asleep:
        return asleep()
    last = retry_policy.failures[-1]
    if retry_policy.only_capacity and last.refusal is not None:
        return RequestRefused(last.refusal)
    cause = last.cause or _LEAVES.get(last.word, FailCause.CAPACITY)
    count = len(retry_policy.failures)
    return RequestFailed(
        cause, f"no worker finished it in {count} attempts; last: {last}", retry_policy.reasons
    )


def asleep() -> RequestRefused:
    """Return the refusal if every possible worker sleeps."""
    return RequestRefused(Refusal(code=RefusalCode.ASLEEP, message="every worker is asleep"))


def too_late(job: Job) -> RequestFailed:
    """Return the error of a passed deadline."""
    return DeadlinePassed(
        FailCause.TIMEOUT, "the request's deadline passed", job.retry_policy.reasons
    )


_NUMBERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


def _asked(request: EngineCoreRequest) -> dict[str, float]:
    """Return numbers of a request by OpenTelemetry's names for GenAI."""
    params = request.params
    if request.pooling is not None:
        return {}
    found = {attribute: getattr(params, name) for name, attribute in _NUMBERS.items()}
    attributes = {attribute: value for attribute, value in found.items() if value is not None}
    if params.n > 1:
        attributes["gen_ai.request.choice.count"] = params.n
    return attributes


@dataclass(frozen=True, slots=True)
class AttemptRecorder(Observer):
    """Recorder of attempts in the recording of a call."""

    recording: Recording

    def sent(self, job: Job, attempt: Attempt) -> None:
        now, recording, request = time.monotonic(), self.recording, job.request
        number, rule = attempt.number, attempt.placement.rule
        recording.num_prompt = max(recording.num_prompt, len(request.prompt_token_ids))
        attempt.watch = recording.watch
        record = AttemptRecord(number, rule, attempt.kind, now, scene=job.scene)
        if not recording.attempt(record):
            return  # an unsampled span would have no end
        attempt.record = record
        if recording.span is None:
            return
        if recording.asked is None:
            recording.asked = _asked(request)
        attributes = {
            "tandem.attempt": number,
            "tandem.attempt_kind": attempt.kind,
            "tandem.rule": rule,
        }
        begin = now - recording.arrived + recording.started
        record.span = recording.span.child("attempt", begin, "client", attributes)
        attempt.watch = Watch(recording.request_id, record.span.traceparent)

    def ended(self, job: Job, attempt: Attempt, failure: AttemptFailure | None, now: float) -> None:
        record = attempt.record
        if record is not None and record.end is None:
            record.end = time.monotonic()
            if failure is not None:
                record.failure = str(failure)
                record.failed_worker = failure.worker_name


@dataclass(frozen=True, slots=True)
class RouteRecorder(Observer):
    """Recorder of a canary's workers and shape."""

    route: Route

    def answered(self, job: Job, attempt: Attempt, leg: Leg) -> None:
        revisions = {each.is_prefill: each.worker.note.revision for each in attempt.legs}
        paired = attempt.placement.prefill is not None
        self.route.served_shape = Shape.DISAGGREGATED if paired else Shape.AGGREGATED
        self.route.served_prefill = revisions.get(True, "")
        self.route.served_decode = revisions.get(False, "")


MAX_FINISHES = 16
"""Maximum ends of choices in a record."""


class Stopwatch(Observer):
    """Metrics of one request; times are seconds of the loop's clock."""

    __slots__ = (
        "_first",
        "_last",
        "_metrics",
        "_num_tokens",
        "_recording",
        "_started",
        "_takes_partial",
    )

    def __init__(
        self,
        metrics: RouterMetrics,
        now: float,
        recording: Recording | None = None,
        *,
        takes_partial: bool = False,
    ) -> None:
        self._takes_partial = takes_partial
        self._metrics = metrics
        self._started = now
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._num_tokens = 0
        self._recording = recording
        metrics.request_came()

    def admitted(self, request: EngineCoreRequest) -> None:
        self._metrics.request_started(
            num_prompt=len(request.prompt_token_ids),
            num_choices=request.params.n,
            max_tokens=request.params.max_tokens if request.pooling is None else None,
        )

    def sent(self, job: Job, attempt: Attempt) -> None:
        shape = "whole" if attempt.placement.prefill is None else "handoff"
        self._metrics.attempt(shape, attempt.kind)

    def answered(self, job: Job, attempt: Attempt, leg: Leg) -> None:
        """Count an attempt's first token, and the error of its forecast."""
        if job.request.pooling is not None or any(each.has_output for each in attempt.legs):
            return
        self._metrics.first_token_from(str(leg.worker.role))
        forecast, came = attempt.placement.forecast, leg.came_at or attempt.received_at
        if forecast is not None:
            error = abs(came - attempt.started_at - forecast.ttft)
            self._metrics.forecast(forecast.way, error)

    def ended(self, job: Job, attempt: Attempt, failure: AttemptFailure | None, now: float) -> None:
        if failure is not None:
            kind = "failed" if failure.refusal is None else "refused"
            self._metrics.attempt_failed(kind, failure.word)

    def output(self, output: EngineCoreOutput, now: float) -> None:
        if self._first is None:
            self._first = now
            self._metrics.first_token(now - self._started)
        last = self._last.get(output.choice)
        if last is not None:
            self._metrics.next_token(now - last)
        self._last[output.choice] = now
        count = len(output.token_ids)
        self._num_tokens += count
        recording = self._recording
        if recording is not None:
            if recording.first_output is None:
                recording.first_output = now
            recording.num_outputs += 1  # no call per token
            recording.num_tokens += count
            if output.finish is not None and len(recording.finishes) < MAX_FINISHES:
                recording.finishes.append(str(output.finish))
        if output.num_cached_tokens is not None:
            self._cached(output.num_cached_tokens)

    def pooled(self, output: PooledOutput, now: float) -> None:
        """Record an answer without tokens."""
        self._first = self._last[output.choice] = now
        if self._recording is not None:
            self._recording.output(0)
        self._cached(output.num_cached_tokens)

    def _cached(self, num_tokens: int) -> None:
        """Count cached prompt tokens, once per job."""
        if num_tokens:
            self._metrics.cached_tokens(num_tokens)
        if self._recording is not None:
            self._recording.num_cached += num_tokens

    def failed(self, error: RequestFailed | RequestRefused) -> None:
        """Count an early end, which may be the client's doing."""
        if isinstance(error, AdmissionRefused):
            return  # counted by the queue
        if isinstance(error, ReaderTooSlow):
            self._metrics.request_cancelled()  # the client reads nothing more
            return
        if isinstance(error, DeadlinePassed) and self._takes_partial and self._first is not None:
            return  # answered with the partial output
        if isinstance(error, RequestFailed):
            self._metrics.request_failed(str(error.cause))
        elif error.refusal.code not in MISTAKES:
            self._metrics.request_failed(str(error.refusal.code))

    def end(self, now: float) -> None:
        if self._first is None:
            return
        last = max(self._last.values())
        self._metrics.request_ended(
            seconds=now - self._started,
            num_tokens=self._num_tokens,
            num_choices=len(self._last),
            decode_seconds=last - self._first,
        )


KEPT = 256


class Explanations(Observer):
    """Latest ``KEPT`` attempts. Used in the loop's thread."""

    def __init__(self) -> None:
        self._latest: deque[Explained] = deque(maxlen=KEPT)

    def sent(self, job: Job, attempt: Attempt) -> None:
        explained = Explained(
            job.name, attempt.number, job.num_prompt, attempt.placement, job.request.tenant
        )
        attempt.explained = explained
        self._latest.append(explained)

    def answered(self, job: Job, attempt: Attempt, leg: Leg) -> None:
        """Record the time of a leg's first output."""
        explained, pair = attempt.explained, attempt.placement.pair
        if explained is None:
            return
        came = attempt.received_at if leg.came_at is None else leg.came_at
        if explained.ttft is None:
            explained.ttft = came - attempt.started_at
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
