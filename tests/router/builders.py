"""Builders for the router's tests: requests, facts, views, and a dispatcher over a pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from tests.router.fake_worker import FakeWorker
from tests.waiting import until

from tandem.link.liveness import LinkTimes
from tandem.llm.cpu_pool import CpuPool
from tandem.protocol.card import WorkerRole
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation
from tandem.protocol.keys import KeyRing
from tandem.protocol.messages import LoadReport
from tandem.protocol.outputs import EngineCoreOutput, PooledOutput
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SamplingParams
from tandem.router.dispatch.admission import AdmissionLimits, AdmissionQueue, Turns
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.explain import DispatchLimits
from tandem.router.dispatch.fleet import Fleet
from tandem.router.metrics import RouterMetrics
from tandem.router.placement.forecast import Targets
from tandem.router.placement.policy import PlacementPolicy
from tandem.router.placement.prefix_index import PrefixIndex
from tandem.router.placement.snapshot import WorkerView
from tandem.router.workers.pool import WorkerPool

BUSY = LoadReport(
    num_running=20, num_waiting=0, waiting_tokens=500, free_blocks=1000, total_blocks=1000
)
"""A load that makes others go first."""
LIMITS = AdmissionLimits(
    max_inflight_requests=100,
    max_inflight_tokens=100_000,
    max_queued_requests=100,
    max_queued_tokens=100_000,
    max_queue_age=5.0,
)


def make_request(num_prompt: int = 40, **params: Any) -> EngineCoreRequest:
    """A request of ``num_prompt`` distinct tokens; 8 tokens are wanted, 0 is end-of-sequence."""
    fields = {"max_tokens": 8, "temperature": 0.0, **params}
    extra = {
        name: fields.pop(name)
        for name in ("emitted", "finished_choices", "budget_ms", "priority", "cache_salt")
        if name in fields
    }
    return EngineCoreRequest(
        key=RequestKey(b"caller", "theirs", 0),
        prompt_token_ids=list(range(1000, 1000 + num_prompt)),
        params=SamplingParams(**fields).verify(),
        eos_token_ids=(0,),
        **extra,
    )


def inc(number: int) -> Incarnation:
    return Incarnation(number.to_bytes(16, "big"))


def view(number: int, role: WorkerRole, **fields: Any) -> WorkerView:
    settings = {"fingerprint": "f", "max_model_len": 2048, "max_num_seqs": 8, **fields}
    return WorkerView(incarnation=inc(number), role=role, name=f"{role}{number}", **settings)


STRICT = PlacementPolicy(Targets(0.3, 0.025), 0.05, strict=True)
"""Placement that hands over whatever it can."""


class Stack:
    """Pool, fleet and dispatcher, as the app composes them, without HTTP and text."""

    def __init__(
        self, *, curve: KeyRing | None = None, beat_timeout: float = 2.0, **limits: Any
    ) -> None:
        """``beat_timeout``: less where a test waits for a silent worker to be lost."""
        self.metrics = RouterMetrics("fake")
        times = LinkTimes(beat_interval=0.05, beat_timeout=beat_timeout, stall_timeout=1.0)
        self.pool = WorkerPool(new_incarnation(), times=times, counter=self.metrics, curve=curve)
        self.fleet = Fleet(self.pool, PrefixIndex(1 << 20))
        self.admission = AdmissionQueue(LIMITS, self.metrics)
        self.cpu_pool = CpuPool()
        waits = {"request_timeout": 10.0, "worker_wait": 0.3, "resume_wait": 0.3}
        self.dispatcher = Dispatcher(
            self.pool,
            self.fleet,
            STRICT,
            self.admission,
            self.metrics,
            DispatchLimits(**{**waits, **limits}),
            turns=Turns(),
            cpu_pool=self.cpu_pool,
        )
        self.pool.start(self.fleet)
        self.dispatcher.start()

    async def find(self, *workers: FakeWorker) -> None:
        """Connect, and wait until every worker is up and every hand-off link is known."""
        for worker in workers:
            self.pool.add(worker.endpoint)
        await self.known(*workers)

    async def known(self, *workers: FakeWorker) -> None:
        """Wait until these are up: on a machine that is busy one may be lost, and come back."""
        up = [w for w in workers if w.role is WorkerRole.PREFILL]
        async with asyncio.timeout(5):
            while not self._knows(workers, up):
                await self.pool.wait_change(0.05)

    def _knows(self, workers: Sequence[FakeWorker], prefill: Sequence[FakeWorker]) -> bool:
        known = self.pool.workers
        if any(worker.incarnation not in known for worker in workers):
            return False
        return all(
            producer.incarnation in known[worker.incarnation].peers
            for worker in workers
            if worker.role is WorkerRole.DECODE
            for producer in prefill
            if producer.revision == worker.revision
        )

    async def run(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> list[EngineCoreOutput]:
        async with aclosing(self.stream(request, context)) as outputs:
            return [output async for output in outputs]

    def stream(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> AsyncGenerator[EngineCoreOutput, None]:
        """Outputs of a request of tokens, as they come."""
        source: Any = self.dispatcher.stream(request, context)
        return cast(AsyncGenerator[EngineCoreOutput, None], source)

    async def vectors(self, request: EngineCoreRequest) -> list[PooledOutput]:
        """All outputs of a request that is pooled."""
        source: Any = self.dispatcher.stream(request)
        async with aclosing(source) as outputs:
            return [output async for output in outputs]

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        self.cpu_pool.close()
        await self.dispatcher.close()
        await self.pool.close()

    def metric(self, name: str, **labels: str) -> float:
        """Value of one series, 0 if it does not exist."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def tokens_of(outputs: Sequence[EngineCoreOutput], choice: int = 0) -> list[int]:
    """Ids of one choice; checks that positions have neither gaps nor repeats."""
    ids: list[int] = []
    for output in outputs:
        if output.choice == choice:
            assert output.position == len(ids)
            ids += output.token_ids
    return ids


async def beats(stack: Stack, worker: FakeWorker) -> None:
    """Wait until the worker's load is known."""
    known = stack.pool.workers[worker.incarnation]
    await until(lambda: known.load == worker.load)
