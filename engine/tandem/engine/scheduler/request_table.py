"""All requests of this engine by place, and the one way to end each.

Scheduler, remote half and updater move requests through these methods, so blocks, rows on the ranks
and promises are released in one place.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from tandem.base.fair_order import FairOrder
from tandem.engine.cache.manager import KVCacheManager, held_blocks
from tandem.engine.request import (
    Order,
    Request,
    RequestGroup,
    RequestState,
)
from tandem.engine.scheduler.connector import Hold, KVConnector
from tandem.engine.scheduler.constrained import Constrained
from tandem.engine.scheduler.gates import Gates
from tandem.engine.scheduler.stats import FinishedRecord, StepStats, closed
from tandem.engine.step import SeqId
from tandem.protocol.errors import FailCause, Refusal
from tandem.protocol.ids import RequestKey
from tandem.protocol.outputs import EngineOutput, Failed, Refused
from tandem.protocol.timeline import NoteBook

SLACK = 64
"""Discarded entries that a heap may keep in addition to one for each member."""


_Entry = tuple[Order, SeqId]


@dataclass(slots=True)
class _Heap:
    entries: list[_Entry] = field(default_factory=list)
    count: int = 0
    """Members; other entries are of requests that left."""
    tokens: int = 0
    """Tokens that the members have to compute."""


class WaitingQueue:
    """Queue with a heap for each tenant; discarded entries are skipped. Entries hold no request, so
    that its memory is freed."""

    def __init__(self, *, keeps: bool = False) -> None:
        """``keeps``: tokens that a member has computed before are mostly in the prefix cache."""
        self._keeps = keeps
        self._heaps: dict[str, _Heap] = {}
        self.first_tenants: Set[str] = frozenset()
        """Tenants that go first within a priority."""
        self.passed_over: Set[str] = frozenset()
        """Tenants whose requests wait for the next step."""
        self._members: dict[SeqId, tuple[Request, int, bool]] = {}
        """Each with its counted tokens, and whether it is a new request."""
        self._num_tokens = 0
        self.num_new = 0
        """Requests with no sequence that was in a step."""
        self.num_new_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._members

    @property
    def num_tokens(self) -> int:
        """Return the tokens that all members have to compute, without those in the cache."""
        return self._num_tokens

    def push(self, request: Request) -> None:
        assert request.seq not in self._members, f"{request} waits twice"
        count = len(request.token_ids)
        is_new = request.num_preemptions == 0 and request.leads
        if is_new:
            self.num_new += 1
            self.num_new_tokens += count
        elif self._keeps:
            count -= count if request.num_preemptions else request.num_prompt
        self._members[request.seq] = request, count, is_new
        self._num_tokens += count
        heap = self._heaps.setdefault(request.tenant, _Heap())
        heap.count += 1
        heap.tokens += count
        heapq.heappush(heap.entries, (request.order, request.seq))

    def peek(self) -> Request | None:
        if len(self._heaps) == 1:
            ((tenant, heap),) = self._heaps.items()
            return None if tenant in self.passed_over else self._first(heap)
        firsts = [
            first
            for tenant, heap in self._heaps.items()
            if tenant not in self.passed_over and (first := self._first(heap)) is not None
        ]
        return min(firsts, key=self._place_of, default=None)

    def wanted(self) -> Iterator[tuple[str, int, Request]]:
        """Yield each tenant, its tokens (at least one per request), and its first request."""
        for tenant, heap in self._heaps.items():
            first = self._first(heap)
            if first is not None:
                yield tenant, max(heap.tokens, heap.count), first

    def _place_of(self, request: Request) -> tuple[int, bool, Order]:
        return request.order[0], request.tenant not in self.first_tenants, request.order

    def _first(self, heap: _Heap) -> Request | None:
        entries = heap.entries
        while entries:
            member = self._members.get(entries[0][1])
            if member is not None:
                return member[0]
            heapq.heappop(entries)
        return None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heaps[request.tenant].entries)
        self._forget(request)
        return request

    def in_order(self) -> Iterator[Request]:
        """Yield members in order, regardless of ``first_tenants``. Costs by the number read;
        nothing may be pushed or popped meanwhile."""
        heaps = [self._ordered(each.entries) for each in self._heaps.values()]
        if len(heaps) == 1:
            return heaps[0]
        return heapq.merge(*heaps, key=lambda each: each.order)

    def _ordered(self, heap: list[_Entry]) -> Iterator[Request]:
        front = [(heap[0][0], 0)] if heap else []
        while front:
            _, at = heapq.heappop(front)
            member = self._members.get(heap[at][1])
            if member is not None:
                yield member[0]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(front, (heap[child][0], child))

    def discard(self, request: Request) -> None:
        if request.seq in self._members:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        _, count, is_new = self._members.pop(request.seq)
        heap = self._heaps[request.tenant]
        heap.count -= 1
        heap.tokens -= count
        self._num_tokens -= count
        if is_new:
            self.num_new -= 1
            self.num_new_tokens -= count
        if not heap.count:
            del self._heaps[request.tenant]
        elif len(heap.entries) > 2 * heap.count + SLACK:
            # A new list: an iteration goes on with the old one.
            heap.entries = [each for each in heap.entries if each[1] in self._members]
            heapq.heapify(heap.entries)


class WaitingForRemoteKVs:
    """Requests that wait outside the queue until their KV comes, or may be computed."""

    def __init__(self) -> None:
        self._coming: dict[SeqId, bool] = {}
        """Parked requests; True if their KV is to come."""
        self.num_tokens = 0
        """Their tokens known at parking."""
        self.num_coming = 0

    def __len__(self) -> int:
        return len(self._coming)

    def add(self, request: Request, *, comes: bool) -> None:
        """Park a request; ``comes``: its KV is to come, otherwise it may not start yet."""
        assert request.seq not in self._coming, f"{request} is parked twice"
        self._coming[request.seq] = comes
        self.num_tokens += request.num_prefill
        self.num_coming += request.num_prefill * comes

    def discard(self, request: Request) -> None:
        comes = self._coming.pop(request.seq, None)
        if comes is not None:
            self.num_tokens -= request.num_prefill
            self.num_coming -= request.num_prefill * comes


ABORT = "abort"
FAILED = "error"
HANDED_OVER = "handed_over"
"""Reasons of a request's end, in addition to those of ``FinishReason``."""

_AWAITS_KV = (RequestState.WAITING_FOR_REMOTE_KVS, RequestState.LOADING)

_Deadline = tuple[float, int, RequestKey]


class Outbox:
    """Messages of a step to routers, by incarnation and in order, until the engine takes them."""

    def __init__(self) -> None:
        self.outputs: dict[bytes, list[EngineOutput]] = {}
        self.failed: dict[bytes, list[Failed]] = {}
        self.refused: dict[bytes, list[Refused]] = {}
        self.ended: list[NoteBook] = []

    def emit(self, router: bytes, output: EngineOutput) -> None:
        self.to(router).append(output)

    def to(self, router: bytes) -> list[EngineOutput]:
        """Return the list of a router's outputs, which may be extended until the next ``take``."""
        outputs = self.outputs.get(router)
        if outputs is None:
            outputs = self.outputs[router] = []
        return outputs

    def fail(self, key: RequestKey, cause: FailCause, message: str) -> None:
        failed = Failed(key.request, key.attempt, cause, message)
        self.failed.setdefault(key.router, []).append(failed)

    def refuse(self, key: RequestKey, refusal: Refusal) -> None:
        """Report the refusal of a request that had been accepted."""
        self.refused.setdefault(key.router, []).append(Refused(key.request, key.attempt, refusal))

    def take_refused(self) -> dict[bytes, list[Refused]]:
        taken = self.refused
        if taken:
            self.refused = {}
        return taken

    def take_ended(self) -> list[NoteBook]:
        taken = self.ended
        if taken:
            self.ended = []
        return taken

    def take(self) -> tuple[dict[bytes, list[EngineOutput]], dict[bytes, list[Failed]]]:
        """Return outputs and failures since the last call."""
        taken = self.outputs, self.failed
        self.outputs, self.failed = {}, {}
        return taken


class RequestTable:
    """Sequences by place: waiting (queue), parked (remote), loading, running; and blocks handed
    out."""

    def __init__(
        self,
        manager: KVCacheManager,
        outbox: Outbox,
        *,
        connector: KVConnector | None = None,
        gates: Gates | None = None,
    ) -> None:
        self.manager = manager
        self.outbox = outbox
        self.connector = connector
        self.gates = gates if gates is not None else Gates()
        has_states = bool(manager.groups.states)
        self.constrained = Constrained(has_states=has_states)
        self.stats = StepStats()
        self.groups: dict[RequestKey, RequestGroup] = {}
        self.tenants: Counter[str] = Counter()
        """Requests in the engine, by tenant."""
        self.tenants_changed: float | None = None
        """Time of the last change of tenant between requests."""
        self._last_tenant: str | None = None
        self.turns = FairOrder()
        self.by_seq: dict[SeqId, Request] = {}
        self.waiting = WaitingQueue(keeps=manager.enable_caching)
        self.parked = WaitingForRemoteKVs()
        self.loading: dict[SeqId, Request] = {}
        self.running: list[Request] = []
        """Best order first."""
        self.held: dict[RequestKey, list[int]] = {}
        """Blocks that the connector keeps for requests that have ended."""
        self.is_short = False
        """Whether a ready hand-off found no room at its last try."""
        self.dropped: list[SeqId] = []
        self._numbers = itertools.count()
        self._deadlines: list[_Deadline] = []
        """A heap; some entries are of groups that have ended."""
        self._left_running = False

    @property
    def busy(self) -> bool:
        """Return whether a sequence with blocks may need more, so that a start leaves some free."""
        return bool(self.running or self.loading)

    def next_seq(self) -> SeqId:
        return SeqId(next(self._numbers))

    def admit(self, group: RequestGroup) -> None:
        self.groups[group.key] = group
        tenant = group.source.tenant
        self.tenants[tenant] += 1
        if tenant != self._last_tenant:
            if self._last_tenant is not None:
                self.tenants_changed = group.arrival
            self._last_tenant = tenant
        if group.deadline is None:
            return
        if len(self._deadlines) > 2 * len(self.groups) + SLACK:
            self._deadlines = [each for each in self._deadlines if self._group_of(each)]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (group.deadline, group.number, group.key))

    def enter(self, request: Request) -> None:
        self.by_seq[request.seq] = request
        request.group.live[request.choice] = request

    def fork(self, parent: Request, child: Request) -> None:
        for gate in parent.group.gates:
            gate.forked(parent, child)
        if child.constraint is not None:
            self.constrained.add(child)

    def gate(self, request: Request, now: float) -> None:
        """Keep a request aside until its gates are open."""
        request.state = RequestState.GATED
        self.gates.wait(request, now)

    def let_in(self, request: Request) -> None:
        """Mark a request as past its gates; it has no place yet."""
        request.state = RequestState.WAITING
        if request.constraint is not None:
            self.constrained.add(request)

    def join(self, request: Request) -> None:
        """Add a sequence to the running ones, at the place of its order."""
        request.state = RequestState.RUNNING
        self.turns.begin(request.group.turn)
        running = self.running
        if running and request.order < running[-1].order:
            insort(running, request, key=lambda each: each.order)
        else:
            running.append(request)

    def preempt(self, request: Request) -> None:
        """Free the blocks of a sequence that is no longer in ``running``; queue it again."""
        request.group.num_preemptions += 1
        self.stats.preemptions += 1
        self.queue_again(request)

    def queue_again(self, request: Request) -> None:
        """Queue a sequence that has no place to be computed again, without its blocks if it has
        any."""
        self.manager.cache_full(request)
        self.manager.free(request)
        request.state = RequestState.PREEMPTED
        request.num_computed = 0
        request.num_announced = 0
        request.num_preemptions += 1
        self._leave_rank(request)
        self.waiting.push(request)

    def let_go(self, request: Request, why: str, now: float, *, keep: bool = False) -> None:
        """End a sequence in any place. ``keep``: a peer may still write its blocks."""
        if request.state is RequestState.RUNNING:
            self._left_running = True
            self.manager.cache_full(request)
        self.waiting.discard(request)
        self.parked.discard(request)
        self.loading.pop(request.seq, None)
        request.state = RequestState.FINISHED
        if request.group.gates:
            self.gates.leave(request)
            if request.constraint is not None:
                self.constrained.remove(request)
        self._leave_rank(request)
        del self.by_seq[request.seq]
        group = request.group
        group.num_generated += request.num_generated
        del group.live[request.choice]
        if not group.live:
            keep = self._end_group(request, why, now) or keep
        if keep:
            self.held[group.key] = self.manager.pin_for_transfer(request)
        else:
            self.manager.free(request)

    def end_choices(self, key: RequestKey, choices: Iterable[int], now: float) -> None:
        """End choices whose reader has found their end. A choice without its own sequence, or whose
        KV is to come, ends with its next token. Unknown ones are ignored."""
        group = self.groups.get(key)
        if group is None:
            return
        there = {choice: each for each in group.live.values() for choice in each.choices}
        for choice in there.keys() & set(choices):
            group.cut.add(choice)
            if there[choice].state not in _AWAITS_KV:
                self.end_cut(there[choice], now)
        self.sweep()

    def end_cut(self, request: Request, now: float) -> None:
        """End a sequence whose reader has found its end, unless other choices or a peer need it."""
        alone = len(request.choices) == 1 and request.preemptible and not request.finished
        if alone and request.choice in request.group.cut:
            self.let_go(request, ABORT, now)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or held by a known owner."""
        held = [held_blocks(each.block_tables) for each in self.by_seq.values() if each.num_blocks]
        self.manager.check([*held, *self.held.values()])

    def check_count(self) -> None:
        """Check the number of blocks if no request is left, which is cheap."""
        assert not self.by_seq, "blocks are counted when nothing runs"
        held = {block for blocks in self.held.values() for block in blocks}
        self.manager.check_count(len(held))

    def fail(
        self,
        group: RequestGroup,
        cause: FailCause,
        message: str,
        now: float,
        *,
        keep: bool = False,
    ) -> None:
        """End all choices of a request and report the cause to its router; ``keep`` as for
        ``let_go``."""
        for request in list(group.live.values()):
            self.let_go(request, FAILED, now, keep=keep)
        self.outbox.fail(group.key, cause, message)

    def refuse(self, group: RequestGroup, refusal: Refusal, now: float) -> None:
        for request in list(group.live.values()):
            self.let_go(request, FAILED, now)
        self.outbox.refuse(group.key, refusal)

    def released(self, key: RequestKey) -> bool:
        """Free blocks that were handed out; return False if none were."""
        blocks = self.held.pop(key, None)
        if blocks is None:
            return False
        self.manager.unpin(blocks)
        return True

    def sweep(self) -> None:
        if self._left_running:
            running = RequestState.RUNNING
            self.running = [each for each in self.running if each.state is running]
            self._left_running = False

    def expired(self, now: float) -> list[RequestGroup]:
        """Return groups whose deadline has passed, each once."""
        spent = []
        while self._deadlines and self._deadlines[0][0] <= now:
            group = self._group_of(heapq.heappop(self._deadlines))
            if group is not None:
                spent.append(group)
        return spent

    def _group_of(self, deadline: _Deadline) -> RequestGroup | None:
        """Return the group of a deadline if it has not ended; a later group may have its key."""
        _, number, key = deadline
        group = self.groups.get(key)
        return group if group is not None and group.number == number else None

    def _leave_rank(self, request: Request) -> None:
        if request.on_rank:
            self.dropped.append(request.seq)
            request.on_rank = False

    def _end_group(self, request: Request, why: str, now: float) -> bool:
        group = request.group
        del self.groups[group.key]
        tenant = group.source.tenant
        self.turns.charge(tenant, group.num_generated)
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]
        if group.notes is not None:
            self.outbox.ended.append(closed(group, why, now))
        self.stats.finished.append(record_of(group, request.num_prompt, why, now))
        return self.connector is not None and self.connector.finished(request, why) is Hold.KEPT


def record_of(group: RequestGroup, num_prompt: int, why: str, now: float) -> FinishedRecord:
    """Return the metrics' record of a request that ended at ``now``."""
    first, scheduled, arrival = group.first_token, group.scheduled, group.arrival
    params = group.source.params
    return FinishedRecord(
        reason=why,
        num_prompt=num_prompt,
        num_generated=group.num_generated,
        max_tokens=params.max_tokens,
        n=params.n,
        num_preemptions=group.num_preemptions,
        num_computed_prompt=group.num_computed_prompt,
        queue=None if scheduled is None else scheduled - arrival,
        prefill=None if first is None or scheduled is None else first - scheduled,
        decode=None if first is None else now - first,
        end_to_end=now - arrival,
    )
