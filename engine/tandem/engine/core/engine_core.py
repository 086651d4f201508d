"""Engine core: one step at a call, without sockets and threads.

A shell (``EngineCoreProc``, ``InprocClient``, a simulator) calls it from one thread and sends the
outputs. With ``async_scheduling`` a step is launched before the results of the last are read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass, field

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config import EngineConfig
from tandem.engine.core.sleep import Sleep
from tandem.engine.core.step_notes import StepCosts, StepNotes
from tandem.engine.executor.base import Executor, OnKVWritten
from tandem.engine.kv_memory import Capacity, KVCacheAllocator
from tandem.engine.metrics import EngineMetrics
from tandem.engine.offload.connector import OffloadConnector
from tandem.engine.offload.medium import blocks_of
from tandem.engine.request import Gate
from tandem.engine.scheduler.admission import Limits, SeedSource
from tandem.engine.scheduler.connector import KVConnector
from tandem.engine.scheduler.scheduler import Scheduler
from tandem.engine.stat_loggers import PrometheusStatLogger, StatLoggers
from tandem.engine.step import ModelRunnerOutput, SchedulerOutput
from tandem.engine.structured import structured_outputs
from tandem.protocol.card import ModelCard, WorkerRole
from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import Refusal, RefusalCode, TandemError
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.messages import DecodeBatch, LoadReport
from tandem.protocol.outputs import (
    BlockEvents,
    EngineOutput,
    Failed,
    Refused,
)
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.timeline import NoteBook

LEAST_S = 0.001
"""Minimum wait; most masks take a tenth of that."""
MOST_S = 0.02
MARGIN_S = 0.0005
"""Time kept back, as steps differ."""
STEPS = 4
"""Number of past steps whose least time counts."""


class MaskWait:
    """Deadlines of the step loop's waits for masks, computed from past waits."""

    def __init__(self, *, overlaps: bool) -> None:
        """``overlaps``: the device computes a step while the step loop waits."""
        self._overlaps = overlaps
        self._begun = 0.0
        self._until = 0.0
        self._waited = 0.0
        self._room: deque[float] = deque(maxlen=STEPS)

    def until(self) -> float:
        """Return the deadline for late masks; the wait begins now."""
        room = min(self._room, default=0.0)
        self._begun = time.monotonic()
        self._until = self._begun + min(max(room, LEAST_S), MOST_S)
        return self._until

    def over(self) -> None:
        self._waited = min(time.monotonic(), self._until) - self._begun

    def updated(self, idle: float) -> None:
        """Record that the wait for a result took ``idle`` seconds."""
        if self._overlaps:
            self._room.append(self._waited + idle - MARGIN_S)
        self._waited = 0.0


@dataclass(slots=True)
class StepOutputs:
    """Outputs of one call of ``step``."""

    progressed: bool
    """False: no step ran and there is no output; wait for a message before the next call."""
    outputs: dict[bytes, list[EngineOutput]] = field(default_factory=dict)
    """Outputs by router incarnation."""
    failed: dict[bytes, list[Failed]] = field(default_factory=dict)
    blocks: BlockEvents | None = None
    """Changes of the prefix cache, for every router."""
    refused: dict[bytes, list[Refused]] = field(default_factory=dict)
    """Accepted requests that cannot be served, by router incarnation."""
    ended: Sequence[NoteBook] = ()

    def by_router(
        self,
    ) -> Iterator[tuple[Incarnation, tuple[EngineOutput, ...], tuple[Failed, ...]]]:
        for router in {**self.outputs, **self.failed}:
            outputs, failed = self.outputs.get(router, ()), self.failed.get(router, ())
            yield Incarnation(router), tuple(outputs), tuple(failed)


logger = logging.getLogger(__name__)

STEP_DEADLINE_S = 600.0
"""Time after which a step has hung and the engine ends, in seconds."""
QUIET_S = 0.5
"""Idle seconds after which every block is checked."""


class EngineCore:
    """One model's scheduler over one started executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        capacity: Capacity,
        *,
        connector: KVConnector | None = None,
        metrics: EngineMetrics | None = None,
        gates: Sequence[Gate] | None = None,
        stat_loggers: StatLoggers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the engine. ``capacity`` comes from ``executor.start``. ``connector`` precedes the
        offload tier. ``gates`` None are the usual wait conditions. ``clock`` is monotonic, in
        seconds."""
        layout = capacity.layout
        self.config = config
        self.capacity = capacity
        self.fingerprint = config.fingerprint(layout)
        self.manager = KVCacheManager(
            capacity.num_blocks,
            layout.block_size,
            groups=layout.groups,
            max_chunk=config.scheduler.max_pending_tokens,
            enable_caching=config.enable_prefix_caching,
            watermark=config.scheduler.watermark,
        )
        self.max_model_len = self.manager.groups.max_tokens(
            capacity.num_blocks, config.max_model_len
        )
        if self.max_model_len < config.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, fewer than the model's context of %d",
                self.max_model_len,
                config.max_model_len,
            )
        self.draining = False
        limits = Limits.of(config, self.max_model_len)
        self._offload = self._attach_tier(capacity)
        given = (connector, self._offload)
        self.wake: Callable[[], None] = lambda: None
        """Makes the shell call ``step`` again; set by the shell, called by any thread."""
        if gates is None:
            gates = (structured_outputs(config, lambda: self.wake()),)
        self._gates = gates
        self.scheduler = Scheduler(
            config.scheduler,
            self.manager,
            limits=limits,
            fingerprint=self.fingerprint.digest,
            connectors=[each for each in given if each is not None],
            gates=self._gates,
            step_sizes=capacity.step_sizes,
            clock=clock,
        )
        self._executor = executor
        self.sleep: Sleep = Sleep(self, executor, clock)
        self.profile = executor.profile
        self._clock = clock
        self._seeds = SeedSource(config.model.seed)
        self._stats = stat_loggers if stat_loggers is not None else StatLoggers()
        if metrics is not None:
            self._stats.put(PrometheusStatLogger(metrics))
            metrics.set_cache_info(config.cache, capacity.num_blocks, layout.block_size)
            metrics.set_device(capacity.device_name)
            if self._offload is not None:
                metrics.show_offload(self._offload)
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput], float]] = deque()
        """Steps in flight, each with its launch time."""
        self._was_busy = False
        self._unchecked_since: float | None = None
        self._steps = 0
        costs = StepCosts(config.facts, capacity.layout, config.dtype)
        self._notes = StepNotes(self.scheduler, costs)
        self._updated_at = 0.0
        self._mask_wait = MaskWait(overlaps=config.device != "cpu" and self._depth > 1)

    @classmethod
    def launch(
        cls,
        config: EngineConfig,
        executor: Executor,
        *,
        allocate: KVCacheAllocator | None = None,
        connect: Callable[[Capacity], KVConnector | None] | None = None,
        metrics: EngineMetrics | None = None,
        stat_loggers: StatLoggers | None = None,
    ) -> EngineCore:
        """Start the executor, then the engine; a failure stops the executor."""
        capacity = executor.start(config, allocate)
        try:
            connector = None if connect is None else connect(capacity)
            return cls(
                config,
                executor,
                capacity,
                connector=connector,
                metrics=metrics,
                stat_loggers=stat_loggers,
            )
        except BaseException:
            executor.stop()
            raise

    @property
    def has_work(self) -> bool:
        """Return whether there are requests, steps in flight, outputs, or pending transfers."""
        return bool(self._in_flight) or self.scheduler.has_work or self.scheduler.has_pending

    def keys(self) -> list[RequestKey]:
        """Return the requests of the scheduler, the oldest first."""
        return self.scheduler.keys()

    def waiting_keys(self) -> list[RequestKey]:
        """Return the requests that have computed nothing and hold no block yet."""
        return self.scheduler.waiting_keys()

    def holds(self, key: RequestKey) -> bool:
        return self.scheduler.holds(key)

    @property
    def takes_nothing(self) -> bool:
        """Return whether new requests are refused: the engine drains, sleeps, or is about to."""
        return self.draining or self.sleep.refuses

    def add(self, request: EngineCoreRequest) -> Refusal | None:
        """Add a request, or return the reason for its refusal."""
        if self.draining:
            return Refusal(code=RefusalCode.DRAINING, message="the worker is on its way out")
        if self.sleep.refuses:
            return Refusal(code=RefusalCode.ASLEEP, message="the worker sleeps")
        return self.scheduler.add(self._seeds.seeded(request))

    def abort(self, key: RequestKey) -> bool:
        """Drop a request and free its blocks; return False if it is unknown."""
        return self.scheduler.abort(key)

    def end_choices(self, key: RequestKey, choices: Collection[int]) -> None:
        """Drop some choices of a request and the blocks that only they hold. Unknown choices are
        ignored."""
        self.scheduler.request_table.end_choices(key, choices, self._clock())

    def abort_router(self, router: bytes) -> int:
        """Drop a lost router's requests and hand-offs; return their number."""
        known = (*self.keys(), *self.scheduler.held_keys())
        return sum(self.abort(key) for key in known if key.router == router)

    def drain(self) -> None:
        """Refuse new requests from now on; finish running ones."""
        self.draining = True

    def step(self) -> StepOutputs:
        outputs = self.advance()
        self.observe()
        return outputs

    def advance(self) -> StepOutputs:
        """Plan and launch a step, and return the outputs of the oldest one in flight.

        Raises the executor's errors; the engine must stop then.
        """
        self._draw()
        plan = self.scheduler.schedule()
        if plan is not None:
            launched = self._clock()  # a CPU computes before it returns
            self._in_flight.append((plan, self._executor.execute(plan), launched))
        updates = bool(self._in_flight) and (plan is None or len(self._in_flight) >= self._depth)
        if updates:
            if len(self._in_flight) == 1:
                self._draw()
            self._update()
        outputs, failed = self.scheduler.outbox.take()
        refused = self.scheduler.outbox.take_refused()
        blocks = self.manager.log.drain()
        progressed = plan is not None or updates or bool(outputs or failed or refused)
        if not progressed:
            self._executor.check_health()
        ended = self.scheduler.outbox.take_ended()
        return StepOutputs(progressed, outputs, failed, blocks, refused, ended)

    def observe(self) -> None:
        """Observe metrics and check the blocks, after the outputs of ``advance`` are sent.

        Call it after every ``advance``, also idle ones. Raises IntegrityError for leaked blocks.
        """
        stats = self.scheduler.take_stats()
        for record in stats.finished:
            if record.decode is not None and record.prefill is not None:
                self.scheduler.measured.note_end(record.prefill + record.decode)
        self._stats.observe(stats, self.scheduler.make_stats)
        self._check_when_idle()

    def call(self, command: Command) -> Reply:
        match command.name:
            case CommandName.RESET_PREFIX_CACHE:
                return self._reset_prefix_cache(command)
            case CommandName.DRAIN:
                self.drain()
                return Reply(id=command.id, ok=True)
            case CommandName.STATS:
                return Reply(id=command.id, ok=True, values=self.stats())
            case CommandName.START_PROFILE:
                return self._start_profile(command)
            case CommandName.STOP_PROFILE:
                return self._profile(command, None)
            case CommandName.SLEEP:
                return self.sleep.fall(command)
            case CommandName.WAKE_UP:
                return self.sleep.wake(command)
            case CommandName.IS_SLEEPING:
                return self.sleep.state(command)

    def _reset_prefix_cache(self, command: Command) -> Reply:
        if self.scheduler.has_promises:
            message = "KV is promised to a peer or on its way from one; try again later"
            return Reply(id=command.id, ok=False, message=message)
        dropped = self.manager.reset_prefix_cache()
        return Reply(id=command.id, ok=True, values={"dropped_blocks": dropped})

    def _start_profile(self, command: Command) -> Reply:
        folder = self.config.profiler.torch_profiler_dir
        if folder is None:
            message = "profiles have no folder: the engine was started without --torch-profiler-dir"
            return Reply(id=command.id, ok=False, message=message)
        return self._profile(command, folder)

    def _profile(self, command: Command, folder: str | None) -> Reply:
        try:
            return Reply(id=command.id, ok=True, message=self.profile(folder))
        except TandemError as error:
            return Reply(id=command.id, ok=False, message=str(error))

    def stats(self) -> dict[str, float]:
        now = self.scheduler.make_stats()
        return {
            "running": now.running,
            "waiting": now.waiting,
            "parked": now.parked,
            "loading": now.loading,
            "gated": now.gated,
            "held_requests": now.held_requests,
            "held_blocks": now.held_blocks,
            "free_blocks": now.free_blocks,
            "total_blocks": self.manager.pool.num_blocks,
            "cached_blocks": self.manager.pool.num_cached,
            "offloaded_blocks": 0 if self._offload is None else self._offload.num_cached,
            "steps": self._steps,
            "in_flight": len(self._in_flight),
        }

    def cached_blocks(self) -> BlockEvents:
        """Return the whole prefix cache with the offloaded blocks, for a new router."""
        return BlockEvents(stored=self.manager.cached(), cleared=True)

    def still_cached(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        return tuple(filter(self.manager.is_cached, hashes))

    def load_report(self) -> LoadReport:
        now, decode_batch = self.scheduler.make_stats(), self.scheduler.decoding
        return LoadReport(
            num_running=now.running,
            num_waiting=now.waiting + now.deferred,
            waiting_tokens=self.scheduler.waiting_tokens,
            loading_tokens=self.scheduler.loading_tokens,
            free_blocks=now.free_blocks,
            total_blocks=self.manager.pool.num_blocks,
            leased_blocks=now.held_blocks,
            num_decoding=decode_batch.streams,
            context_tokens=decode_batch.context,
            chunk_tokens=self.scheduler.mixed_chunk(decode_batch),
            mixed_chunk_tokens=self.scheduler.mixed_chunk(max(decode_batch, DecodeBatch(1))),
            bounds_steps=self.config.scheduler.max_itl_ms is not None,
            **self._notes.report(self._clock()),
            draining=self.draining,
            sleeping=self.sleep.refuses,
            computed_tokens=self._stats.totals.computed_tokens,
            generated_tokens=self._stats.totals.generated_tokens,
        )

    def card(
        self,
        *,
        role: WorkerRole | None = None,
        incarnation: Incarnation | None = None,
        control: str | None = None,
        max_handoff_tokens: int | None = None,
    ) -> ModelCard:
        return ModelCard(
            model=self.config.served_model_name,
            fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            block_size=self.manager.block_size,
            num_blocks=self.manager.pool.num_blocks,
            vocab_size=self.config.facts.vocab_size,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_logprobs=self.config.max_logprobs,
            role=role,
            incarnation=incarnation,
            control=control,
            max_handoff_tokens=max_handoff_tokens,
            pooling=self.config.facts.pooling,
            prompt_embeds=self.config.embeds_size,
            prefix_caching=self.config.enable_prefix_caching,
            ends_choices=True,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or held by a known holder."""
        self.scheduler.request_table.check_integrity()

    def close(self) -> None:
        """Stop the executor and the work of gates. May be called twice."""
        for gate in self._gates:
            gate.close()
        self._stats.shutdown(self.scheduler.make_stats)
        self._executor.stop()

    def _attach_tier(self, capacity: Capacity) -> OffloadConnector | None:
        if not capacity.num_cpu_blocks:
            return None
        tier = OffloadConnector(
            blocks_of(self.config, capacity),
            manager=self.manager,
            block_bytes=capacity.layout.block_bytes,
        )
        self.manager.attach_tier(tier)
        return tier

    def _draw(self) -> None:
        if self.scheduler.awaits_masks:
            masks = self.scheduler.masks(self._mask_wait.until())
            self._mask_wait.over()
            self._executor.draw(masks)

    def _update(self) -> None:
        plan, future, launched = self._in_flight.popleft()
        started = max(launched, self._updated_at)
        waits_from = time.monotonic()
        if self.scheduler.announces and isinstance(future, OnKVWritten):
            self.scheduler.announce(future.wait_nearly(STEP_DEADLINE_S))
        output = future.result(timeout=STEP_DEADLINE_S)
        self._mask_wait.updated(time.monotonic() - waits_from)
        self.scheduler.update_from_output(output)
        self._steps += 1
        self._updated_at = self._clock()
        self._notes.note(plan, self._updated_at - started, self._updated_at)

    def _check_when_idle(self) -> None:
        """Check for leaked blocks: their number when work ends, each of them after a quiet
        period."""
        busy = bool(self._in_flight or self.scheduler.has_requests)
        if busy:
            self._unchecked_since = None
        elif self._was_busy:
            self.scheduler.request_table.check_count()
            self._unchecked_since = self._clock()
        elif self._unchecked_since is not None and self._clock() - self._unchecked_since >= QUIET_S:
            self._unchecked_since = None
            self.check_integrity()
        self._was_busy = busy
