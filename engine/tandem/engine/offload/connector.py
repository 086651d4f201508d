"""Scheduler's side of the CPU tier: keeps evicted blocks and loads them on demand.

An evicted block is copied to a host block before the step that overwrites it. Ranks run the copies
(``BlockTransfers``) in the order of steps, so nothing here waits for a device. A request whose load
fails is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.offload.lru import LRUBlocks
from tandem.engine.request import Request
from tandem.engine.scheduler.connector import (
    Event,
    Hold,
    LoadMissed,
    Lookup,
    Remote,
)
from tandem.engine.step import BlockLoad, BlockTransfers, TransferReport
from tandem.protocol.errors import Refusal
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.kv import BlockTables, Fence, FirstToken, Loaded, Released


@dataclass(slots=True)
class OffloadStats:
    """Counts since the start."""

    block_bytes: int
    num_stored: int = 0
    num_loaded: int = 0
    """Blocks copied back, those of failed loads included."""
    num_evicted: int = 0
    num_declined: int = 0
    """Blocks without room in host memory, as all blocks were being read."""
    num_failed_loads: int = 0
    hit_tokens: int = 0
    """Tokens that were loaded instead of computed."""


logger = logging.getLogger(__name__)

_NOTHING = Remote(Lookup.NOTHING)
_WAIT = BlockTransfers()


@dataclass(slots=True)
class _Load:
    key: RequestKey
    hosts: list[int]
    """Pinned until the load ends."""
    keys: list[BlockHash]
    num_tokens: int
    let_go: bool = False
    """Whether the request has ended and left its blocks here."""


class OffloadConnector:
    """InStepConnector and BlockTier of one engine."""

    def __init__(
        self,
        blocks: LRUBlocks,
        *,
        manager: KVCacheManager,
        block_bytes: int,
    ) -> None:
        """``blocks`` are those of the medium. ``manager`` finds prefixes, and its log receives the
        hashes for routers."""
        self.stats = OffloadStats(block_bytes)
        self._blocks = blocks
        self._manager = manager
        self._log = manager.log
        self._stores: dict[int, int] = {}
        """Host block to device block, for the next step."""
        self._loads: list[BlockLoad] = []
        self._offered: list[int] = []
        """Host blocks of ``lookup`` since the last step, pinned until the next."""
        self._prefix = manager.groups.nothing
        """Prefix of the last ``lookup``."""
        self._under_way: dict[int, _Load] = {}
        self._ticket_of: dict[RequestKey, int] = {}
        self._missed: set[RequestKey] = set()
        """Requests whose load has failed: nothing is loaded for them again."""
        self._tickets = 0
        self._events: list[Event] = []

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def num_cached(self) -> int:
        return len(self._blocks)

    @property
    def queued(self) -> bool:
        return bool(self._stores or self._loads)

    def on_evict(self, block: int, digest: BlockHash) -> None:
        """Copy the block out, unless the tier has its content or every host block is being read."""
        if self._blocks.find(digest) is not None:
            self._blocks.touch(digest)
        else:
            placed = self._blocks.put(digest)
            if placed is None:
                self.stats.num_declined += 1
                return
            host, lost = placed
            if lost is not None:
                self.stats.num_evicted += 1
                self._report_lost(lost)
            self._stores[host] = block
        self._log.stored(digest)

    def cached(self) -> tuple[BlockHash, ...]:
        return self._blocks.hashes()

    def holds(self, digest: BlockHash) -> bool:
        return self._blocks.find(digest) is not None

    def reset(self) -> int:
        hashes = self._blocks.hashes()
        for digest in hashes:
            self._forget(digest)
        return len(hashes)

    def admit(self, request: Request) -> Refusal | None:
        return None

    def lookup(self, request: Request, num_local: int) -> Remote:
        """Return the blocks after ``num_local`` tokens up to a gap, kept until the next step. Only
        for a request of one sequence whose prompt is not scored."""
        if len(request.group.live) != 1 or request.key in self._missed:
            return _NOTHING
        prefix = self._manager.find_prefix_with_tier(request, request.max_cached_tokens)
        if prefix.num_tokens <= num_local:
            return _NOTHING
        hosts = [self._host(key) for key, _, _ in self._manager.in_tier(request, prefix)]
        self._blocks.pin(hosts)
        self._offered += hosts
        self._prefix = prefix
        return Remote(Lookup.READY, prefix.num_tokens, in_step=True)

    def begin_load(self, request: Request, tables: BlockTables, tokens: range) -> None:
        """Fill the request's blocks with the next step; call it directly after ``lookup``."""
        keys, hosts, blocks = [], [], []
        for key, group, index in self._manager.in_tier(request, self._prefix):
            self._blocks.touch(key)
            keys.append(key)
            hosts.append(self._host(key))
            blocks.append(tables[group][index])
        self._blocks.pin(hosts)
        self._tickets += 1
        self._loads.append(BlockLoad(self._tickets, tuple(zip(hosts, blocks, strict=True))))
        self._under_way[self._tickets] = _Load(request.key, hosts, keys, len(tokens))
        self._ticket_of[request.key] = self._tickets

    def _host(self, key: BlockHash) -> int:
        host = self._blocks.find(key)
        assert host is not None, "blocks that lookup offered are here until the next step"
        return host

    def started(self, request: Request) -> None:
        """Do nothing."""

    def computed(self, request: Request, tables: BlockTables, tokens: range, done: Fence) -> None:
        """Do nothing: blocks are offloaded when the cache evicts them."""

    def first_tokens(
        self, request: Request, first: Sequence[FirstToken], finish: str | None
    ) -> None:
        """Do nothing."""

    def finished(self, request: Request, why: str) -> Hold:
        self._missed.discard(request.key)
        ticket = self._ticket_of.get(request.key)
        if ticket is None:
            return Hold.FREE
        self._under_way[ticket].let_go = True
        return Hold.KEPT

    def cancelled(self, key: RequestKey) -> None:
        """Do nothing."""

    def poll(self) -> Sequence[Event]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def has_pending(self) -> bool:
        """Return whether a load is under way or unreported, or the next step has copies, which a
        fork may add after the last plan."""
        return bool(self._under_way or self._events or self.queued)

    def transfers(self, *, idle: bool) -> BlockTransfers | None:
        if self._offered:
            self._blocks.unpin(self._offered)
            self._offered = []
        if not self.queued:
            return _WAIT if idle and self._under_way else None
        stores = tuple((block, host) for host, block in self._stores.items())
        loads = tuple(self._loads)
        self._stores, self._loads = {}, []
        self.stats.num_stored += len(stores)
        self.stats.num_loaded += sum(len(each.blocks) for each in loads)
        return BlockTransfers(stores, loads)

    def moved(self, report: TransferReport) -> None:
        for ticket in report.loaded:
            load = self._ended(ticket)
            self.stats.hit_tokens += load.num_tokens
            self._events.append(Released(load.key) if load.let_go else Loaded(load.key, ()))
        for ticket, why in report.failed:
            load = self._ended(ticket)
            logger.warning("%d blocks did not come back from host memory: %s", len(load.hosts), why)
            self.stats.num_failed_loads += 1
            for digest in load.keys:
                self._forget(digest)
            if load.let_go:
                self._events.append(Released(load.key))
            else:
                self._missed.add(load.key)
                self._events.append(LoadMissed(load.key))

    def _ended(self, ticket: int) -> _Load:
        load = self._under_way.pop(ticket)
        del self._ticket_of[load.key]
        self._blocks.unpin(load.hosts)
        return load

    def _forget(self, digest: BlockHash) -> None:
        if self._blocks.forget(digest):
            self._report_lost(digest)

    def _report_lost(self, digest: BlockHash) -> None:
        if self._manager.pool.find(digest) is None:
            self._log.removed(digest)
