"""The router without its sockets: real jobs, attempts, ladder, fleet and placement, on a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.sim.clock import Clock
from bench.sim.times import Way
from bench.sim.worker import SimWorker

from tandem.link.liveness import LinkTimes
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.outputs import EngineCoreOutput
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams
from tandem.router.dispatch.attempt import Attempt
from tandem.router.dispatch.explain import Explanations
from tandem.router.dispatch.fleet import Fleet
from tandem.router.dispatch.job import Job
from tandem.router.metrics import RouterMetrics
from tandem.router.placement.policy import PlacementPolicy
from tandem.router.placement.prefix_index import PrefixIndex
from tandem.router.workers.pool import WorkerPool

ME = Incarnation(b"r" * 16)
INDEX_BYTES = 1 << 28
ATTEMPTS = 3


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; seconds of the run."""

    sent: float
    num_prompt: int
    new_tokens: int
    """Of the prompt, those that no worker had cached when it was sent."""
    kind: str = ""
    way: str = ""
    """How its last attempt went: pair, decode or prefill."""
    times: list[float] = field(default_factory=list)
    """When each token came."""
    tokens: list[int] = field(default_factory=list)
    forecast: float | None = None
    """Seconds to the first token that placement expected."""


Done = Callable[[Seen], None]


class Unserved(RuntimeError):
    """Nobody took a request, or all attempts at it failed: the run says nothing then."""


class _Timer:
    """A call that may be taken back."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """It will not come."""
        self.cancelled = True


class _Loop:
    """Event loop as an attempt uses it."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake

    def time(self) -> float:
        """Seconds."""
        return self._clock.now

    def call_later(self, seconds: float, then: Callable[[], None]) -> _Timer:
        """Call it, and wake who reads, unless it is taken back."""
        timer = _Timer()

        def due() -> None:
            if not timer.cancelled:
                then()
                self._wake()

        self._clock.at(self._clock.now + seconds, due)
        return timer


class SimRouter:
    """Sends requests to workers as ``policy`` says, and writes down when tokens come."""

    def __init__(
        self, clock: Clock, way: Way, workers: list[SimWorker], policy: PlacementPolicy
    ) -> None:
        self._clock, self._way, self._policy = clock, way, policy
        self._pool = WorkerPool(ME, times=LinkTimes(), counter=RouterMetrics())
        self._workers = workers
        for worker in workers:
            self._pool.workers[worker.incarnation] = worker.view
            worker.connection.heard.append((self._blocks, self._drain))
        self._index = PrefixIndex(INDEX_BYTES)
        self.fleet = Fleet(self._pool, self._index)
        self._metrics = RouterMetrics()
        self._explanations = Explanations()
        self._open: dict[str, tuple[Job, Seen, Done]] = {}
        self._coming = 0
        self.ways: Counter[str] = Counter()
        """Attempts by what they were."""
        for number, worker in enumerate(workers):
            self._beat(worker, number / len(workers))

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def expect(self, more: int) -> None:
        """So many more requests will come (or fewer): workers beat as long as any do."""
        self._coming += more

    def send(
        self, prompt: list[int], max_tokens: int, done: Done, *, kind: str = "", seed: int = 0
    ) -> None:
        """A request comes now; ``done`` is called with what its client saw."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=seed)
        request = EngineCoreRequest(
            key=RequestKey(b"client", "theirs", 0), prompt_token_ids=prompt, params=params
        )
        name = f"{len(self._open)}-{self._clock.now}-{seed}"
        job = Job(
            request,
            name=name,
            deadline=self._clock.now + 1e6,
            max_attempts=ATTEMPTS,
            metrics=self._metrics,
        )
        seen = Seen(self._clock.now, len(prompt), len(prompt), kind)
        self._open[name] = job, seen, done
        self._begin(job, seen)

    def _beat(self, worker: SimWorker, after: float) -> None:
        def beat() -> None:
            worker.beat()
            if self._open or self._coming:
                self._clock.at(self._clock.now + self._way.beat, beat)

        self._clock.at(self._clock.now + after, beat)

    def _begin(self, job: Job, seen: Seen) -> None:
        now = self._clock.now
        hashes = {
            worker.fingerprint: job.prompt.of(worker.fingerprint, worker.card.block_size)
            for worker in self._pool.workers.values()
        }
        facts = job.facts(self.fleet.hits(hashes))
        placement = self._policy.place(facts, self.fleet.snapshot(now), job.retry_policy.exclusions)
        if placement is None:
            raise Unserved(f"no worker takes a prompt of {facts.num_tokens} tokens")
        if job.num_dispatched == 0:
            self.fleet.asked(facts, now)
        workers = [self._pool.workers[placement.worker]]
        if placement.prefill is not None:
            workers.insert(0, self._pool.workers[placement.prefill])
        seen.new_tokens = seen.num_prompt - max(facts.hits.values(), default=0)
        seen.way = "pair" if len(workers) == 2 else str(workers[0].role)
        seen.forecast = None if placement.forecast is None else placement.forecast.ttft
        self.ways[seen.way] += 1
        loop: Any = _Loop(self._clock, partial(self._drain, job.name))
        attempt = Attempt(job.num_dispatched, placement, loop)
        job.placement, job.attempt = placement, attempt
        self._explanations.sent(job, attempt)
        failure = attempt.start(job.legs(ME, workers, now), job.hits)
        assert failure is None, "simulated links are up"

    def _blocks(self, worker: Any, events: Any) -> None:
        self.fleet.worker_blocks(worker, events)

    def _drain(self, name: str) -> None:
        """Read what came for a request, as the dispatcher does."""
        found = self._open.get(name)
        if found is None:
            return
        job, seen, done = found
        attempt = job.attempt
        assert attempt is not None
        while (item := attempt.pop()) is not None:
            leg, event = item
            if isinstance(event, EngineCoreOutput):
                self._write(job, seen, leg, event)
                continue
            failure = attempt.judge(leg, event)  # type: ignore[arg-type]
            if failure is not None:
                attempt.end(job.name, finished=False)
                self.fleet.ended(job, attempt, failure, self._clock.now)
                job.failed(failure, [])
                if job.num_dispatched >= ATTEMPTS:
                    raise Unserved(f"{failure}")
                self._begin(job, seen)
                return
        if job.ledger.done:
            attempt.end(job.name, finished=True)
            del self._open[name]
            seen.tokens = list(job.ledger.emitted[0])
            done(seen)

    def _write(self, job: Job, seen: Seen, leg: Any, output: EngineCoreOutput) -> None:
        attempt = job.attempt
        assert attempt is not None
        if not leg.has_output:
            for observer in (self._explanations, self.fleet):
                observer.answered(job, attempt, leg)
        attempt.note_output(leg)
        fresh = job.ledger.write(output)
        if fresh is not None:
            came = self._clock.now + self._way.answer
            seen.times += [came] * len(fresh.token_ids)
