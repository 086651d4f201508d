"""Scheduler: takes requests, plans steps, applies their results, without executor and socket.

``num_computed`` advances when a step is planned, so that the next can be planned while it runs.
Freed blocks may be reused while a step in flight writes them: steps run in order. Only a
connector's writes are out of order, and wait (``RemoteKV``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config.scheduler import SchedulerConfig
from tandem.engine.kv_memory import StepSize
from tandem.engine.request import (
    Gate,
    Request,
    RequestGroup,
    RequestState,
)
from tandem.engine.scheduler.admission import (
    Limits,
    admitted,
    embeds_refusal,
    end_of,
    ended_before,
    requests_of,
)
from tandem.engine.scheduler.connector import InStepConnector, KVConnector
from tandem.engine.scheduler.connectors import compose
from tandem.engine.scheduler.constrained import IDLE_WAIT_SECONDS, Ending
from tandem.engine.scheduler.drafter import Drafter
from tandem.engine.scheduler.gates import Gates
from tandem.engine.scheduler.planner import Planner
from tandem.engine.scheduler.remote import RemoteKV
from tandem.engine.scheduler.request_table import ABORT, Outbox, RequestTable
from tandem.engine.scheduler.stats import SchedulerStats, StepStats
from tandem.engine.scheduler.updater import Chunk, Updater
from tandem.engine.step import (
    FenceDone,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from tandem.engine.timing import MeasuredSteps, Padding
from tandem.protocol.errors import FailCause, Refusal, RefusalCode
from tandem.protocol.hashing import root_hash
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.kv import Fence
from tandem.protocol.messages import DecodeBatch
from tandem.protocol.outputs import Finish, FinishReason
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce
from tandem.protocol.timeline import NoteBook


@dataclass(slots=True)
class Flow:
    """Numbers of steps; they run in order, so a fence also covers all earlier steps."""

    planned: int = 0
    updated: int = 0
    fence: Fence = field(default_factory=FenceDone)
    """Fence of the writes of step ``updated``."""

    def came_through(self, step: int, fence: Fence) -> None:
        """Record a result; the fence is set before the number, for readers in other threads."""
        self.fence = fence
        self.updated = step

    def behind_planned(self) -> Fence:
        """Return a fence that is done when all steps planned so far have written their blocks."""
        return _Behind(self, self.planned)


@dataclass(frozen=True, slots=True)
class _Behind:
    flow: Flow
    step: int

    def done(self) -> bool:
        return self.flow.updated >= self.step and self.flow.fence.done()


CHOICE_COST = 16
"""Tokens charged for a choice at arrival, in the order of tenants; generated tokens are charged at
its end."""


class Scheduler:
    """Plans steps and applies their results, in one thread; never blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        *,
        limits: Limits,
        fingerprint: str = "",
        connectors: Sequence[KVConnector] = (),
        gates: Sequence[Gate] = (),
        step_sizes: Sequence[StepSize] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``fingerprint`` is the root of block hashes. ``connectors`` are asked in order, at most
        one an InStepConnector. ``gates`` are conditions that requests may wait for. ``step_sizes``
        are the ranks' padded steps. ``clock`` is monotonic, in seconds."""
        self.config = config
        self.limits = limits
        self.manager = manager
        self.outbox = Outbox()
        self._connector = connector = compose(connectors)
        in_step = [each for each in connectors if isinstance(each, InStepConnector)]
        assert len(in_step) < 2, "two connectors move blocks within steps"
        self._in_step = in_step[0] if in_step else None
        self._hands_over = len(connectors) > len(in_step)
        self.request_table = RequestTable(
            manager, self.outbox, connector=connector, gates=Gates(gates)
        )
        seats = config.max_num_seqs
        drafts = config.num_speculative_tokens
        drafter = Drafter(drafts) if drafts else None
        self._updater = Updater(self.request_table, max_num_seqs=seats, drafter=drafter)
        self._remote: RemoteKV | None = None
        if connector is not None:
            self._remote = RemoteKV(
                connector,
                self.request_table,
                self._updater,
                max_num_seqs=seats,
                vocab_size=limits.vocab_size,
                in_step=self._in_step,
            )
        self.measured, self.padding = MeasuredSteps(), Padding(step_sizes)
        self._planner = Planner(
            config,
            self.request_table,
            self._remote,
            self._in_step,
            self.measured,
            self.padding,
            drafter=drafter,
            computes_whole=limits.computes_whole,
        )
        self._fingerprint = fingerprint
        self._clock = clock
        self._arrivals = 0
        self.flow = Flow()
        self._in_flight: deque[tuple[int, list[Chunk]]] = deque()

    @property
    def has_requests(self) -> bool:
        return bool(self.request_table.groups)

    @property
    def has_work(self) -> bool:
        """Return whether a request is in the engine, blocks are held for an ended one, or a message
        is unsent."""
        request_table, outbox = self.request_table, self.outbox
        unsaid = outbox.outputs or outbox.failed or outbox.refused
        return bool(request_table.groups or request_table.held or unsaid)

    @property
    def has_pending(self) -> bool:
        return self._connector is not None and self._connector.has_pending()

    @property
    def has_promises(self) -> bool:
        """Return whether KV is promised to a peer, or in transfer from one."""
        request_table = self.request_table
        exporting = any(
            isinstance(each.source.kv, Produce) for each in request_table.groups.values()
        )
        return bool(request_table.held or request_table.loading or exporting)

    def keys(self) -> list[RequestKey]:
        """Return the requests in the engine, the oldest first."""
        return list(self.request_table.groups)

    def held_keys(self) -> list[RequestKey]:
        """Return the ended requests whose blocks the connector keeps."""
        return list(self.request_table.held)

    def waiting_keys(self) -> list[RequestKey]:
        """Return the requests that have computed nothing and hold no block."""
        waiting, aside = (
            self.request_table.waiting,
            (RequestState.GATED, RequestState.WAITING_FOR_REMOTE_KVS),
        )
        return [
            key
            for key, group in self.request_table.groups.items()
            if group.live
            and all(each in waiting or each.state in aside for each in group.live.values())
        ]

    def holds(self, key: RequestKey) -> bool:
        return key in self.request_table.groups

    def make_stats(self) -> SchedulerStats:
        request_table, manager = self.request_table, self.manager
        return SchedulerStats(
            running=len(request_table.running),
            waiting=len(request_table.waiting),
            parked=len(request_table.parked),
            loading=len(request_table.loading),
            gated=len(request_table.gates.waiting),
            held_requests=len(request_table.held),
            held_blocks=sum(map(len, request_table.held.values())),
            free_blocks=manager.num_free,
            cache_usage=manager.usage,
        )

    @property
    def waiting_tokens(self) -> int:
        """Return the prompt tokens not yet computed of all requests, those to be loaded
        included."""
        request_table = self.request_table
        begun = sum(max(0, each.num_prefill - each.num_computed) for each in request_table.running)
        loading = sum(each.num_prefill for each in request_table.loading.values())
        return request_table.waiting.num_tokens + request_table.parked.num_tokens + begun + loading

    @property
    def loading_tokens(self) -> int:
        """Return the prompt tokens to be loaded, not computed here."""
        loading = sum(each.num_prefill for each in self.request_table.loading.values())
        return self.request_table.parked.num_coming + loading

    @property
    def decoding(self) -> DecodeBatch:
        """Return the running sequences that are past their prompt and continue here."""
        past = [
            each for each in self.request_table.running if each.num_computed >= each.num_prefill
        ]
        ours = [each.num_computed for each in past if not isinstance(each.kv, Produce)]
        return DecodeBatch(len(ours), sum(ours))

    def mixed_chunk(self, decode_batch: DecodeBatch) -> int:
        """Return the prompt tokens of one request in a step with these decodes."""
        chunk = self.config.long_prefill_token_threshold or self.config.max_num_batched_tokens
        return max(1, min(chunk, self._planner.mixed_prompt_tokens(decode_batch)))

    def add(self, source: EngineCoreRequest) -> Refusal | None:
        taken = self._admitted(source)
        if isinstance(taken, Refusal):
            return taken
        source = taken
        group = self._group_of(source)
        requests = requests_of(
            group,
            priority=source.priority if self.config.policy == "priority" else 0,
            hashes=self._hashes_of(source),
            next_seq=self.request_table.next_seq,
        )
        refusal = self.request_table.gates.admit(source, requests)
        if refusal is None and self._connector is not None:
            refusal = self._connector.admit(requests[0])
        if refusal is not None:
            self.request_table.gates.release(requests)
            return refusal
        self.request_table.admit(group)
        for request in requests:
            self.request_table.enter(request)
        for request in requests:
            self._arrive(request, group.arrival)
        return None

    def abort(self, key: RequestKey) -> bool:
        """End a request and a promised hand-off; return False if it is unknown."""
        group = self.request_table.groups.get(key)
        if group is None:
            if self._connector is not None:
                self._connector.cancelled(key)
            return False
        now = self._clock()
        for request in list(group.live.values()):
            self.request_table.let_go(request, ABORT, now)
        self.request_table.sweep()
        return True

    def schedule(self) -> SchedulerOutput | None:
        now = self._clock()
        for group in self.request_table.expired(now):
            message = "the request's budget was spent before it was done"
            self.request_table.fail(group, FailCause.TIMEOUT, message, now)
        if self.request_table.gates.waiting:
            self._open_gates(now)
        if self.request_table.constrained.has_late:
            self._look_at_late(now)
        if self._remote is not None:
            self._remote.poll(now)
            self._remote.ask(self.flow.planned, now)
            self._remote.begin_loads(self.flow.updated, self.flow.fence)
        self.request_table.sweep()
        builder = self._planner.start_step(now)
        plan = self._planner.finish_step(builder, self.flow.planned + 1)
        if plan is not None:
            self.flow.planned = plan.step
            self._in_flight.append((plan.step, builder.chunks))
        return plan

    @property
    def awaits_masks(self) -> bool:
        """Return whether the step planned last requires ``masks`` before any other call."""
        return self.request_table.constrained.awaits_masks

    def masks(self, until: float) -> TokenMasks:
        """Return the masks of the last planned step; wait to ``until`` (``time.monotonic``)."""
        now = self._clock()
        masks, ended = self.request_table.constrained.look(self.flow.planned, now, until)
        for each in ended:
            self._end_constrained(each, now)
        return masks

    @property
    def announces(self) -> bool:
        """Return whether connectors must be notified of prompts in the oldest step in flight."""
        return self._hands_over and bool(self._in_flight) and bool(self._in_flight[0][1])

    def announce(self, fence: Fence) -> None:
        """Announce KV of the oldest step in flight before its result; ``fence`` is done once it is
        written."""
        self._updater.announce(self._in_flight[0][1], fence)

    def update_from_output(self, output: ModelRunnerOutput) -> None:
        step, chunks = self._in_flight.popleft()
        assert step == output.step, f"step {output.step} came back, {step} was expected"
        self.flow.came_through(step, output.fence)
        self._updater.update_from_output(output, chunks, self._clock())
        if output.transfers is not None and self._in_step is not None:
            self._in_step.moved(output.transfers)
        self.request_table.sweep()
        if self._remote is not None:
            self._remote.begin_loads(step, output.fence)

    def take_stats(self) -> StepStats:
        stats, self.request_table.stats = self.request_table.stats, StepStats()
        return stats

    def _admitted(self, source: EngineCoreRequest) -> EngineCoreRequest | Refusal:
        request_table, config = self.request_table, self.config
        if source.key in request_table.groups or source.key in request_table.held:
            return Refusal(code=RefusalCode.DUPLICATE, message=f"{source.key} is already here")
        taken = admitted(source, self.limits)
        if isinstance(taken, Refusal):
            return taken
        if source.kv is not None and not self._hands_over:
            message = "this worker hands no KV over"
            return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param="kv")
        if source.budget_ms is not None and source.budget_ms <= 0:
            return Refusal(code=RefusalCode.EXPIRED, message="the budget is spent already")
        limit = config.max_num_queued_reqs
        queued = (
            request_table.waiting.num_new
            + len(request_table.parked)
            + len(request_table.gates.waiting)
        )
        if limit is not None and queued >= limit:
            request_table.stats.refused_queue_reqs += 1
            message = f"{queued} requests wait already, at most {limit} may"
            return Refusal(code=RefusalCode.CAPACITY, message=message)
        lives = (each.source.content for each in request_table.groups.values())
        refusal = embeds_refusal(source.content, lives, self.limits.max_held_embeds_bytes)
        return refusal or self._token_refusal(len(source.prompt_token_ids)) or taken

    def _token_refusal(self, num_prompt: int) -> Refusal | None:
        limit, request_table = self.config.max_num_queued_tokens, self.request_table
        queued = (
            request_table.waiting.num_new_tokens
            + request_table.parked.num_tokens
            + request_table.gates.num_tokens
        )
        if limit is None or not queued or queued + num_prompt <= limit:
            return None
        request_table.stats.refused_queue_tokens += 1
        message = f"{queued} tokens wait already; with {num_prompt} more they pass {limit}"
        return Refusal(code=RefusalCode.CAPACITY, message=message)

    def _group_of(self, source: EngineCoreRequest) -> RequestGroup:
        now, budget = self._clock(), source.budget_ms
        self._arrivals += 1
        root = root_hash(
            fingerprint=self._fingerprint,
            block_size=self.manager.block_size,
            adapter=source.adapter,
            salt=source.cache_salt,
        )
        watch = source.watch
        cost = len(source.prompt_token_ids) + CHOICE_COST * source.params.n
        return RequestGroup(
            source=source,
            root=root,
            block_size=self.manager.block_size,
            arrival=now,
            number=self._arrivals,
            turn=self.request_table.turns.enter(source.tenant, cost),
            deadline=None if budget is None else now + budget / 1000,
            max_model_len=end_of(source, self.limits.max_model_len),
            notes=None if watch is None else NoteBook(source.key, watch, now),
        )

    def _hashes_of(self, source: EngineCoreRequest) -> list[BlockHash]:
        full = len(source.prompt_token_ids) // self.manager.block_size
        return list(source.block_hashes) if len(source.block_hashes) == full else []

    def _open_gates(self, now: float) -> None:
        for request, refusal in self.request_table.gates.look(now):
            if refusal is not None:
                self.request_table.refuse(request.group, refusal, now)
                continue
            self.request_table.let_in(request)
            finish, constraint = ended_before(request), request.constraint
            if constraint is not None and (constraint.is_terminated or constraint.is_dead):
                finish = Finish(FinishReason.STOP)
            self._place(request, finish, now)

    def _look_at_late(self, now: float) -> None:
        request_table = self.request_table
        others = self._in_flight or request_table.waiting.peek() is not None
        idle = not others and all(each.constraint is not None for each in request_table.running)
        for each in request_table.constrained.look_at_late(now, IDLE_WAIT_SECONDS if idle else 0.0):
            self._end_constrained(each, now)

    def _end_constrained(self, ending: Ending, now: float) -> None:
        request, refusal = ending
        if request.finished:
            return  # with another choice of its request
        if refusal is not None:
            self.request_table.refuse(request.group, refusal, now)
        else:
            self._updater.close_forced(request, Finish(FinishReason.STOP), now)

    def _arrive(self, request: Request, now: float) -> None:
        finish = ended_before(request)
        stopped = finish is not None and finish.reason is FinishReason.STOP
        if request.group.gates and not stopped:
            self.request_table.gate(request, now)
        else:
            self._place(request, finish, now)

    def _place(self, request: Request, finish: Finish | None, now: float) -> None:
        if finish is not None:
            self._updater.close_forced(request, finish, now)
        elif self._remote is not None and isinstance(request.kv, Consume):
            self._remote.park(request)
        else:
            self.request_table.waiting.push(request)
