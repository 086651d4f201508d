"""``EngineCoreClient`` over many workers: places, sends, merges and retries requests.

A hand-off is sent to P and D at once under one key; the first token of either counts. Owns all
deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Collection,
    Coroutine,
    Iterator,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from operator import attrgetter
from typing import Any

import msgspec

from tandem.llm.cpu_pool import CpuPool
from tandem.protocol.card import ModelCard, WorkerRole
from tandem.protocol.commands import Command, Reply, seconds_for
from tandem.protocol.context import ORDINARY, RequestContext, Route
from tandem.protocol.errors import (
    FailCause,
    RequestFailed,
    RequestRefused,
)
from tandem.protocol.outputs import (
    Accepted,
    EngineCoreOutput,
    EngineOutput,
    PooledOutput,
)
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SEED_BITS, seeded
from tandem.router.dispatch.admission import AdmissionQueue, Turns
from tandem.router.dispatch.attempt import (
    BAD_ENDS,
    Attempt,
    Backlog,
    Leg,
)
from tandem.router.dispatch.explain import (
    AttemptRecorder,
    DispatchLimits,
    Explanations,
    RouteRecorder,
    Stopwatch,
    asleep,
    check_deadlines,
    no_place,
    raise_if_too_late,
    sweep,
    too_late,
    worth_waiting,
)
from tandem.router.dispatch.fleet import Fleet
from tandem.router.dispatch.job import Contradiction, Gap, Job
from tandem.router.dispatch.placing import Placing
from tandem.router.dispatch.retry_policy import (
    AttemptFailure,
    FailedClosed,
    kind_of_attempt,
)
from tandem.router.metrics import RouterMetrics
from tandem.router.placement.policy import Placement, PlacementPolicy
from tandem.router.tenant import current_tenant
from tandem.router.workers.pool import WorkerPool
from tandem.tracing.recording import current, marked


@asynccontextmanager
async def begun(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run a coroutine up to its first wait; cancel it at the end of the block."""
    task = asyncio.create_task(work)
    try:
        await asyncio.sleep(0)
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


CALL_SECONDS = 10.0
"""Deadline of commands that move no memory."""


async def call_all(pool: WorkerPool, command: Command) -> Reply:
    """Run a command on every worker; return ok if all are, values added up.

    The messages are those of failed workers, else of all. Raises RequestFailed.
    """
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
    results = [
        f"{worker.name}: {reply.message}"
        for worker, reply in zip(workers, replies, strict=True)
        if not reply.ok or (ok and reply.message)
    ]
    return Reply(id=command.id, ok=ok, message="; ".join(results), values=values)


logger = logging.getLogger(__name__)


class Dispatcher:
    """Dispatcher; ``start`` it in the serving loop, after the pool."""

    def __init__(
        self,
        pool: WorkerPool,
        fleet: Fleet,
        policy: PlacementPolicy,
        admission: AdmissionQueue,
        metrics: RouterMetrics,
        limits: DispatchLimits,
        *,
        turns: Turns,
        cpu_pool: CpuPool,
    ) -> None:
        """``turns`` and ``cpu_pool`` are shared with other work of the loop."""
        self.pool = pool
        self.fleet = fleet
        self.admission = admission
        self.backlog = Backlog(stream_bytes=limits.stream_backlog, total_bytes=limits.total_backlog)
        self._placing = Placing(fleet, policy, turns=turns, cpu_pool=cpu_pool)
        self.hit_ceiling = self._placing.hit_ceiling
        self._metrics = metrics
        self.canary_metrics = RouterMetrics()
        self.explanations = Explanations()
        self._limits = limits
        self._jobs: dict[str, Job] = {}
        self._next_name = 0
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to watch deadlines."""
        watch = sweep(lambda: self.jobs, self._limits, self.fleet.tidy)
        self._sweeper = asyncio.create_task(watch, name="dispatch-deadlines")

    async def close(self) -> None:
        """Abort all requests. May be called twice."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        for job in list(self._jobs.values()):
            job.expire()

    @property
    def jobs(self) -> Collection[Job]:
        """Return the requests in progress or in the queue."""
        return self._jobs.values()

    async def describe(self) -> ModelCard:
        """Return the card of the decode worker with the longest context, else a prefill worker's.

        Waits until a worker is up.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.worker_wait
        while not (cards := self._cards()):
            left = deadline - loop.time()
            if left <= 0 or not await self.pool.wait_change(left):
                self._metrics.request_came()
                self._metrics.request_failed(str(FailCause.WORKER_LOST))
                raise RequestFailed(FailCause.WORKER_LOST, "no decode worker is connected")
        return max(cards, key=attrgetter("max_model_len"))

    def _cards(self) -> list[ModelCard]:
        decode = [worker.card for worker in self.pool.serving(WorkerRole.DECODE)]
        return decode or [worker.card for worker in self.pool.serving(WorkerRole.PREFILL)]

    async def call(self, command: Command) -> Reply:
        return await call_all(self.pool, command)

    async def stream(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> AsyncIterator[EngineOutput | Accepted]:
        """Stream as ``EngineCoreClient.stream``. ``request.key`` is replaced."""
        loop = asyncio.get_running_loop()
        with self._under_way(request, context, loop) as (job, watch):
            recording = job.recording
            async with aclosing(self._entered(job, loop, context)) as waits:
                async for accepted in waits:
                    yield accepted
            watch.admitted(request)
            while not job.ledger.done:
                attempt = await self._begin(job, loop)
                failure: AttemptFailure | None = None
                while failure is None and not job.ledger.done:
                    item = attempt.pop()
                    if item is None:
                        failure = check_deadlines(job, attempt)
                        if job.tells_accepted and job.is_taken(attempt, loop.time()):
                            yield Accepted(job.name, attempt.number)
                        elif failure is None:
                            await attempt.wait(recording)
                    elif isinstance(item[1], EngineCoreOutput):
                        output, failure = self._write(job, attempt, item[0], item[1])
                        if output is not None:
                            watch.output(output, loop.time())
                            yield output
                            if context.ended:
                                self._end_choices(job, attempt, context.ended)
                    elif isinstance(item[1], PooledOutput):
                        failure = self._write_pooled(job, attempt, item[0], item[1])
                        if failure is None:
                            watch.pooled(item[1], loop.time())
                            yield item[1]
                    else:
                        failure = attempt.judge(item[0], item[1])
                        raise_if_too_late(job, failure, loop.time())
                self._end(job, failure, loop.time())

    @contextmanager
    def _under_way(
        self, request: EngineCoreRequest, context: RequestContext, loop: asyncio.AbstractEventLoop
    ) -> Iterator[tuple[Job, Stopwatch]]:
        """Yield a request's job and stopwatch, from its arrival to its end."""
        came = loop.time() if context.arrived is None else context.arrived
        job = self._open(request, context.route, came)
        timer = loop.call_at(job.deadline, job.expire)
        watch = Stopwatch(job.metrics, came, job.recording, takes_partial=context.takes_partial)
        job.observers = [watch, self.explanations, self.fleet]
        if job.recording is not None:
            job.observers.append(AttemptRecorder(job.recording))
        if job.route is not None:
            job.observers.append(RouteRecorder(job.route))
        try:
            yield job, watch
        except (RequestFailed, RequestRefused) as error:
            watch.failed(error)
            raise
        finally:
            timer.cancel()
            watch.end(loop.time())
            if job.attempt is not None:  # closed, or the deadline passed
                self._end(job, None, loop.time())
            self._leave(job)
            job.metrics.repeated(job.ledger.num_repeated)
            del self._jobs[job.name]

    def _open(self, request: EngineCoreRequest, route: Route | None, came: float) -> Job:
        seconds = self._limits.request_timeout
        if request.budget_ms is not None:
            seconds = min(seconds, request.budget_ms / 1000)
        params = seeded(request.params, secrets.randbits(SEED_BITS))
        name = f"{self._next_name:x}"
        self._next_name += 1
        recording = current()
        job = Job(
            msgspec.structs.replace(request, params=params, tenant=current_tenant.get().id),
            name=name,
            deadline=came + seconds,
            max_attempts=self._limits.max_attempts,
            metrics=self._metrics if route is None else self.canary_metrics,
            route=route,
            recording=recording,
        )
        self._jobs[name] = job
        return job

    async def _entered(
        self, job: Job, loop: asyncio.AbstractEventLoop, context: RequestContext
    ) -> AsyncGenerator[Accepted, None]:
        """Wait for a turn, and yield once if the caller expects that."""
        if not context.tells_accepted:
            await self._enter(job, loop)
            return
        async with begun(self._enter(job, loop)) as entering:
            job.tells_accepted = entering.done()
            if not entering.done():
                yield Accepted(job.name, 0)
            await entering

    async def _enter(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a turn, within the deadline."""
        if job.deadline <= loop.time():
            raise too_late(job)
        try:
            async with asyncio.timeout_at(job.deadline):
                with marked("admission"):
                    request = job.request
                    waited = await self.admission.enter(
                        job.num_prompt, priority=request.priority, tenant=request.tenant
                    )
                    # Prompts of one call begin together, while other tenants wait.
                    job.takes_turn = waited or bool(request.tenant)
        except TimeoutError as error:
            raise too_late(job) from error
        job.admitted = True

    def _leave(self, job: Job) -> None:
        if job.admitted:
            job.admitted = False
            self.admission.leave(job.num_prompt, tenant=job.request.tenant)

    def _give_up(self, job: Job) -> None:
        """End a job that leaves too much unread."""
        logger.warning("request %s: too much of its answer waits to be read", job.name)
        job.given_up = True
        if job.attempt is not None:
            job.attempt.end(job.name, finished=False)
        self._leave(job)

    async def _begin(self, job: Job, loop: asyncio.AbstractEventLoop) -> Attempt:
        """Send the next attempt and return it, or raise the error that ends the request."""
        limits = self._limits
        wait = limits.resume_wait if job.ledger.num_tokens else limits.worker_wait
        while True:
            await self._placing.ready(job)
            with marked("place"):
                placement = self._placing.place(job, loop.time())
            if placement is not None:
                attempt, failure = self._send(job, placement, loop)
                if failure is None:
                    return attempt
                self._end(job, failure, loop.time())
                continue
            if self.fleet.sleeps(pooled=job.request.pooling is not None):
                raise asleep()
            patience, now = job.patience, loop.time()
            patience.begin(now, wait)
            anyone = bool(self.pool.serving(WorkerRole.DECODE)) or (
                job.request.pooling is not None and bool(self._cards())
            )
            over = now >= min(job.deadline, patience.ends)
            if over or not worth_waiting(job, anyone_up=anyone):
                raise no_place(job)
            with marked("no worker"):
                await self.pool.wait_change(min(job.deadline - now, patience.nap(now)))
            if patience.asks_again(loop.time()):
                job.retry_policy.ask_again()

    def _send(
        self, job: Job, placement: Placement, loop: asyncio.AbstractEventLoop
    ) -> tuple[Attempt, AttemptFailure | None]:
        """Send an attempt; return it, and its failure if a link is down."""
        workers = [self.pool.workers[placement.worker]]
        if placement.prefill is not None:
            workers.insert(0, self.pool.workers[placement.prefill])
        attempt = Attempt(
            job.num_dispatched,
            placement,
            loop,
            kind=kind_of_attempt(job.placement, placement),
            backlog=self.backlog,
            tenant=job.request.tenant,
            num_open=job.request.params.n - len(job.ledger.finished_choices),
            all_ended=lambda: self._leave(job),
            overflow=lambda: self._give_up(job),  # not the attempt, which would refer to itself
        )
        if job.num_dispatched:
            logger.info("request %s: %s, %s", job.name, attempt.kind, placement.rule)
        job.placement, job.attempt = placement, attempt
        for observer in job.observers:
            observer.sent(job, attempt)
        legs = job.legs(self.pool.me, workers, loop.time(), attempt.watch)
        return attempt, attempt.start(legs, placement.hits_with_pull(job.hits))

    def _write(
        self, job: Job, attempt: Attempt, leg: Leg, output: EngineCoreOutput
    ) -> tuple[EngineCoreOutput | None, AttemptFailure | None]:
        """Return the new tokens of an output, or the attempt's failure."""
        if not leg.has_output or output.finish is not None:
            if job.request.pooling is not None:
                return None, attempt.failure(leg, FailCause.INTERNAL, "tokens, not a vector")
            if output.finish in BAD_ENDS:
                return None, attempt.failure(leg, FailCause.INTERNAL, f"ended by {output.finish}")
        if not leg.has_output:
            job.fingerprint = leg.worker.compatibility
            for observer in job.observers:
                observer.answered(job, attempt, leg)
            if attempt.placement.prefill is not None and not leg.is_prefill:
                # P reports what was cached; D's share came over the link.
                output = msgspec.structs.replace(output, num_cached_tokens=None)
        attempt.note_output(leg)
        try:
            return job.write(output), None
        except Gap as error:
            return None, attempt.failure(leg, FailCause.INTERNAL, str(error))
        except Contradiction as error:
            failure = attempt.failure(leg, FailCause.IDENTITY, str(error))
            self._end(job, failure, attempt.received_at)
            job.metrics.contradicted()
            logger.error("request %s failed closed: %s", job.name, failure)
            raise FailedClosed(
                FailCause.IDENTITY, f"failed closed: {error}", job.retry_policy.reasons
            ) from error

    def _write_pooled(
        self, job: Job, attempt: Attempt, leg: Leg, output: PooledOutput
    ) -> AttemptFailure | None:
        """Mark the job as answered, or return the attempt's failure."""
        if job.request.pooling is None:
            return attempt.failure(leg, FailCause.INTERNAL, "a vector, not tokens")
        if not output.values or len(output.values) % 4:
            message = f"{len(output.values)} bytes that are not float32 values"
            return attempt.failure(leg, FailCause.INTERNAL, message)
        for observer in job.observers:
            observer.answered(job, attempt, leg)
        attempt.note_output(leg)
        job.ledger.answered()
        return None

    def _end_choices(self, job: Job, attempt: Attempt, ended: list[int]) -> None:
        """End choices whose reader has found their end, for this and later attempts."""
        for choice in ended:
            job.ledger.end(choice)
        attempt.end_choices(job.name, tuple(ended))
        ended.clear()

    def _end(self, job: Job, failure: AttemptFailure | None, now: float) -> None:
        """End an attempt: release its legs, and record its failure."""
        attempt, job.attempt = job.attempt, None
        assert attempt is not None
        workers = [leg.worker for leg in attempt.legs]
        attempt.end(job.name, finished=failure is None and job.ledger.reported)
        for observer in job.observers:
            observer.ended(job, attempt, failure, now)
        if failure is not None:
            job.failed(failure, workers)
            logger.warning("request %s: %s", job.name, failure)
