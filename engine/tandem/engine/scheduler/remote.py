"""Requests whose KV comes from elsewhere: parked, loading, then running.

They are outside the waiting queue, so that late KV delays no other request; blocks and seats are
given in one order (``Turns``). KV that comes within steps is loaded from the queue's head.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from tandem.engine.cache.groups import CachedPrefix
from tandem.engine.request import Order, Request, RequestState
from tandem.engine.scheduler.connector import (
    ComposedConnector,
    InStepConnector,
    KVConnector,
    LoadMissed,
    Lookup,
    Remote,
)
from tandem.engine.scheduler.request_table import RequestTable
from tandem.engine.scheduler.updater import Updater
from tandem.protocol.errors import FailCause
from tandem.protocol.kv import Fence, Loaded, LoadFailed, Ready, Released, frozen


class Turns:
    """Order of one step: hand-offs in order, then waiting requests."""

    def __init__(self, request_table: RequestTable, max_num_seqs: int) -> None:
        self._request_table = request_table
        self._max_num_seqs = max_num_seqs
        self._queue = request_table.waiting.in_order()
        self._next = next(self._queue, None)
        self._blocks = 0
        """Blocks of queued requests before the last hand-off."""
        self._seats = 0
        self._short: Order | None = None
        """Order of the first hand-off without room."""

    def may_reserve(
        self, request: Request, hits: CachedPrefix, count: int, *, extra: int, num_loaded: int
    ) -> bool:
        """Return whether a hand-off finds a seat, and room for ``count`` tokens and ``extra``
        blocks after all before it. False stays for later ones."""
        if self._short is not None:
            return False
        self._claim_before(request.order)
        request_table = self._request_table
        claimed = extra + self._blocks
        room = self._seats < self._free_seats and request_table.manager.can_start(
            hits, count, extra=claimed, num_loaded=num_loaded, keep_spare=request_table.busy
        )
        if not room:
            self._short = request.order
        return room

    def may_start(self, request: Request) -> bool:
        """Return whether no hand-off before this request is without room."""
        return self._short is None or request.order < self._short

    @property
    def _free_seats(self) -> int:
        request_table = self._request_table
        return self._max_num_seqs - len(request_table.running) - len(request_table.loading)

    def _claim_before(self, order: Order) -> None:
        manager = self._request_table.manager
        while self._next is not None and self._next.order < order:
            if self._seats >= self._free_seats or self._blocks > manager.num_free:
                return
            self._seats += 1
            self._blocks += manager.groups.num_blocks(len(self._next.token_ids))
            self._next = next(self._queue, None)


_NOTHING = Remote(Lookup.NOTHING)


class Way(Enum):
    """Decision on the request at the head of the queue."""

    COMPUTE = "compute"
    """It may start here."""
    GONE = "gone"
    """It has left the queue: its KV comes from elsewhere."""
    WAIT = "wait"
    """It is not its turn or has no room; nor has any later request."""


class RemoteKV:
    """Scheduler's use of its connector."""

    def __init__(
        self,
        connector: KVConnector,
        request_table: RequestTable,
        updater: Updater,
        *,
        max_num_seqs: int,
        vocab_size: int,
        in_step: InStepConnector | None = None,
    ) -> None:
        self._connector = connector
        self._look_again = (
            connector.lookup_again if isinstance(connector, ComposedConnector) else connector.lookup
        )
        self._in_step = in_step
        self._request_table = request_table
        self._manager = request_table.manager
        self._updater = updater
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._turns = Turns(request_table, max_num_seqs)
        self._to_load: deque[tuple[int, Request, range]] = deque()
        """Loads reserved while that step was the last one planned. They begin after it, as its rows
        may still write the blocks."""
        self.awaits_fence = False
        """Whether a load waits only for the fence of a step that has ended."""
        self._to_ask: dict[int, Request] = {}
        """Parked requests by ``seq`` to look up in the next step; the others are announced."""
        self._asked: list[Request] = []
        """Requests parked while peers hold what they lend; blocks are free, not yet reserved."""
        self._joined: list[Request] = []
        """Running requests whose blocks are not yet in the prefix cache."""

    def park(self, request: Request, *, comes: bool = True) -> None:
        """Park a request until its KV ``comes``, or else until it may be computed."""
        hits = self._manager.find_cached_prefix(request, request.num_prefill)
        request.group.num_hit = hits.num_tokens
        request.state = RequestState.WAITING_FOR_REMOTE_KVS
        self._request_table.parked.add(request, comes=comes)
        self._to_ask[request.seq] = request

    def poll(self, now: float) -> None:
        while self._joined:
            request = self._joined.pop()
            if request.state is RequestState.RUNNING:  # those that left are cached
                self._manager.cache_full(request)
        for event in self._connector.poll():
            if isinstance(event, Released):
                known = self._request_table.released(event.key)
            elif isinstance(event, Loaded):
                known = self._loaded(event, now)
            elif isinstance(event, LoadMissed):
                known = self._missed(event, now)
            elif isinstance(event, Ready):
                known = self._ready(event)
            else:
                known = self._failed(event, now)
            if not known:
                self._request_table.stats.late_events += 1

    def ask(self, planned: int, now: float) -> None:
        """Look up the parked requests that may have changed, and reserve for ready ones.
        ``planned`` is the last planned step."""
        ready = []
        for request in sorted(self._to_ask.values(), key=lambda each: each.order):
            if request.state is not RequestState.WAITING_FOR_REMOTE_KVS:  # it has ended meanwhile
                del self._to_ask[request.seq]
                continue
            remote = self._look_again(request, request.group.num_hit)
            if remote.announced:
                del self._to_ask[request.seq]
            elif remote.lookup is Lookup.NOTHING or remote.in_step:
                self._compute_here(request)
            elif remote.lookup is Lookup.READY and remote.num_tokens > request.num_prefill:
                count = request.num_prefill
                message = f"KV of {remote.num_tokens} tokens is offered for a prompt of {count}"
                self._request_table.fail(request.group, FailCause.IDENTITY, message, now)
            elif remote.lookup is Lookup.READY:
                ready.append((request, remote))
        self._turns = Turns(self._request_table, self._max_num_seqs)
        self._request_table.is_short = False
        for request, remote in ready:
            if not self._reserve(request, remote, planned):
                self._request_table.is_short = True
                return  # later ones find no room either, and a look is costly

    def way_of(self, request: Request) -> Way:
        """Decide on the request at the head of the queue, and remove it if it leaves. A peer is
        asked only when blocks are free, as it holds what it lends."""
        if request.source.pull is not None and not self._may_ask(request):
            return Way.WAIT
        remote = self._lookup(request)
        if remote.lookup is Lookup.NOTHING:
            return Way.COMPUTE if self._turns.may_start(request) else Way.WAIT
        if not remote.in_step:
            self.park(self._request_table.waiting.pop(), comes=remote.brings)
            if remote.lent:
                self._asked.append(request)
            return Way.GONE
        may = self._turns.may_start(request) and self._load_at_once(request, remote)
        return Way.GONE if may else Way.WAIT

    def started(self, request: Request) -> None:
        self._connector.started(request)

    def begin_loads(self, updated: int, fence: Fence) -> None:
        """Begin loads whose blocks no step in flight can still write."""
        while self._to_load and self._to_load[0][0] <= updated and fence.done():
            _, request, tokens = self._to_load.popleft()
            if request.state is RequestState.LOADING:
                self._connector.begin_load(request, frozen(request.block_tables), tokens)
        self.awaits_fence = bool(self._to_load) and self._to_load[0][0] <= updated

    def _may_ask(self, request: Request) -> bool:
        request_table, manager = self._request_table, self._manager
        if not self._turns.may_start(request):
            return False
        self._asked = [
            each for each in self._asked if each.state is RequestState.WAITING_FOR_REMOTE_KVS
        ]
        before = [each for each in self._asked if each.order < request.order]
        asked = sum(manager.groups.num_blocks(each.num_prefill) + 1 for each in before)
        hits = manager.find_cached_prefix(request, request.max_cached_tokens)
        count = len(request.token_ids)
        return manager.can_start(hits, count, extra=asked, keep_spare=request_table.busy)

    def _lookup(self, request: Request) -> Remote:
        """Return the availability of a queued request's KV. Preempted requests are computed again
        unless a step can load it."""
        connector: KVConnector | None = self._connector
        if request.remote_done or request.num_preemptions:
            connector = self._in_step
        scored = request.kv is None and request.prompt_logprobs is not None
        if connector is None or scored:  # the logits of every position are required
            return _NOTHING
        hits = self._manager.find_cached_prefix(request, request.max_cached_tokens)
        return connector.lookup(request, hits.num_tokens)

    def _load_at_once(self, request: Request, remote: Remote) -> bool:
        request_table, manager = self._request_table, self._manager
        assert self._in_step is not None, "no connector loads KV within steps"
        local = manager.find_cached_prefix(request, request.max_cached_tokens).num_tokens
        prefix = manager.find_prefix_with_tier(request, remote.num_tokens)
        count = len(request.token_ids)
        if not manager.can_start(prefix, count, keep_spare=request_table.busy):
            return False
        request_table.waiting.pop()
        manager.start(request, prefix, count)
        self._enter_loading(request, local, remote.num_tokens)
        tokens = range(local, remote.num_tokens)
        self._in_step.begin_load(request, frozen(request.block_tables), tokens)
        return True

    def _enter_loading(self, request: Request, num_hit: int, num_tokens: int) -> None:
        self._request_table.loading[request.seq] = request
        request.state = RequestState.LOADING
        if request.num_preemptions == 0:
            request.group.num_hit = num_hit
        request.num_computed = num_tokens

    def _compute_here(self, request: Request) -> None:
        self._unpark(request)
        request.state = RequestState.WAITING
        self._request_table.waiting.push(request)

    def _unpark(self, request: Request) -> None:
        self._request_table.parked.discard(request)
        del self._to_ask[request.seq]

    def _ready(self, event: Ready) -> bool:
        group = self._request_table.groups.get(event.key)
        if group is None:
            return False
        request = next(iter(group.live.values()))
        if request.state is RequestState.WAITING_FOR_REMOTE_KVS:
            self._to_ask[request.seq] = request
        return True

    def _reserve(self, request: Request, remote: Remote, planned: int) -> bool:
        """Hold local hits and take all other blocks, with one to decode into. Return False without
        room."""
        manager = self._manager
        count = request.num_prefill
        more = len(manager.groups.tables)
        headroom = int(manager.groups.num_blocks(count) + more <= manager.pool.num_blocks)
        hits = manager.find_cached_prefix(request, min(count, remote.num_tokens))
        local = hits.num_tokens
        tokens = range(local, max(local, remote.num_tokens))
        if not self._turns.may_reserve(
            request, hits, count, extra=headroom * more, num_loaded=tokens.stop
        ):
            return False
        manager.start(request, hits, count, extra=headroom, num_loaded=tokens.stop)
        self._unpark(request)
        self._enter_loading(request, local, tokens.stop)
        # The coming step may have to move earlier content of these blocks first.
        after = planned + 1 if self._in_step is not None and self._in_step.queued else planned
        self._to_load.append((after, request, tokens))
        return True

    def _loaded(self, event: Loaded, now: float) -> bool:
        group = self._request_table.groups.get(event.key)
        if group is None:
            return False
        request = next(iter(group.live.values()))
        early = request.state in (RequestState.WAITING_FOR_REMOTE_KVS, RequestState.GATED)
        if request.state is not RequestState.LOADING and not early:
            return False
        choices = tuple(sorted(each.choice for each in event.first))
        asked = () if event.usable and not event.first else tuple(sorted(request.choices))
        short = bool(event.first) and event.usable and request.num_computed < request.num_prefill
        if short:
            message = f"KV of {request.num_computed} tokens came with a first token, not of all"
            self._request_table.fail(
                group, FailCause.IDENTITY, message, now, keep=not event.blocks_free
            )
        elif choices != asked or (event.usable and early):
            message = f"KV came with first tokens for choices {choices}, not {asked}"
            keep = not event.blocks_free
            self._request_table.fail(group, FailCause.IDENTITY, message, now, keep=keep)
        elif any(each.token_id >= self._vocab_size for each in event.first):
            message = f"KV came with a first token that is none of {self._vocab_size}"
            self._request_table.fail(
                group, FailCause.IDENTITY, message, now, keep=not event.blocks_free
            )
        elif event.usable:
            self._join(request, event, now)
            self._request_table.end_cut(request, now)
        else:
            self._updater.ended_elsewhere(request, event.first, now, keep=not event.blocks_free)
        return True

    def _join(self, request: Request, event: Loaded, now: float) -> None:
        """Run a request whose KV is committed: emit its first tokens again, cache its blocks after
        the next launch."""
        manager = self._manager
        request.remote_done = True
        if request.group.notes is not None:
            request.group.notes.add_all(event.notes)
        self._request_table.loading.pop(request.seq)
        if request.group.scheduled is None:
            request.group.scheduled = now
        self._request_table.join(request)
        if event.first:
            self._count(request)
            if len(event.first) == 1:
                manager.cache_later(request)  # its first step must not wait for it
                self._joined.append(request)
            else:  # they share their blocks from now on
                manager.cache_full(request)
            self._updater.known_first(request, event.first, now)
            return
        self._connector.started(request)
        # The last token's logits are required, so its position is computed in an own block.
        total = len(request.token_ids)
        known = min(request.num_computed, total - 1)
        request.num_computed = known // manager.block_size * manager.block_size
        self._count(request)
        manager.truncate(request, request.num_computed)
        manager.cache_full(request)
        room = manager.grow(request, total)
        assert room is not None, "at least as many blocks were given back just now"

    def _count(self, request: Request) -> None:
        if request.num_preemptions:
            return
        stats, group = self._request_table.stats, request.group
        here = request.num_prefill - request.num_computed
        group.num_computed_prompt += here
        stats.queried_tokens += request.num_prefill
        stats.prompt_tokens += request.num_prefill
        stats.hit_tokens += group.num_hit
        stats.external_tokens += request.num_computed - group.num_hit
        stats.computed_tokens += here
        group.num_hit = request.num_computed  # the cached tokens that clients see

    def _missed(self, event: LoadMissed, now: float) -> bool:
        group = self._request_table.groups.get(event.key)
        if group is None:
            return False
        request = next(iter(group.live.values()))
        if request.state is not RequestState.LOADING:
            return False
        del self._request_table.loading[request.seq]
        self._manager.free(request)
        request.num_computed = 0
        request.state = RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING
        self._request_table.waiting.push(request)
        self._request_table.end_cut(request, now)
        return True

    def _failed(self, event: LoadFailed, now: float) -> bool:
        group = self._request_table.groups.get(event.key)
        if group is None:
            return False
        keep = not event.blocks_free
        self._request_table.fail(group, event.cause, event.message, now, keep=keep)
        return True
