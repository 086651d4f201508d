"""Block tables of sequences: prefix hits, allocation, sharing between choices, freeing.

The only writer of ``Request.block_tables``. All groups share one pool. The scheduler decides;
copies of blocks are collected for the next plan.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tandem.engine.cache.block_pool import BlockEventLog, BlockPool, IntegrityError, is_hash
from tandem.engine.cache.groups import IN_TIER, NO_BLOCK, CachedPrefix, CacheGroups
from tandem.engine.request import Request
from tandem.engine.step import NewBlocks
from tandem.protocol.card import KVGroup, blocks_for
from tandem.protocol.ids import BlockHash

NEVER = sys.maxsize
"""``Request.cache_due`` of a sequence whose blocks are not cached."""


class BlockTier(Protocol):
    """Slower memory for evicted blocks. Routers count them as cached; the tier logs changes in the
    manager's log."""

    def on_evict(self, block: int, digest: BlockHash) -> None:
        """Keep ``block``, cached under ``digest``, before a coming step overwrites it."""
        ...

    def cached(self) -> tuple[BlockHash, ...]:
        """Return every hash in the tier."""
        ...

    def holds(self, digest: BlockHash) -> bool: ...

    def reset(self) -> int: ...


class _Snapshot(NamedTuple):
    """Copy of a state, which its destination's key names once the copy is planned."""

    source: int
    to: int
    key: BlockHash


class KVCacheManager:
    """KV blocks of one engine."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[KVGroup] = (),
        max_chunk: int = 1,
        enable_caching: bool = True,
        watermark: float = 0.0,
    ) -> None:
        """``groups`` are the layout's; none is one group of full attention. ``max_chunk`` is the
        most tokens of a sequence in one step."""
        self.log = BlockEventLog()
        self.pool = BlockPool(num_blocks, self.log)
        self.block_size = block_size
        self.groups = CacheGroups.of(groups, block_size, max_chunk)
        self._is_plain = self.groups.are_plain  # the usual case, which several hundred rows share
        self.enable_caching = enable_caching
        self.spare = int(watermark * num_blocks)
        """Blocks that a start leaves free while others run, so that preemptions are rare."""
        self._tier: BlockTier | None = None
        self._copies: dict[int, int] = {}
        """Destination to source of copies for the next plan; sources are held until then."""
        self._planned_snapshots: list[_Snapshot] = []
        """Snapshots of states that the coming step computes."""
        self._snapshots: list[_Snapshot] = []
        """Snapshots that the next plan copies."""

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Return the share of the blocks that are held, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    @property
    def num_copying(self) -> int:
        """Return the number of blocks that are held for copies of the next plans only."""
        snapshots = len(self._snapshots) + len(self._planned_snapshots)
        return len(set(self._copies.values())) + 2 * snapshots

    def attach_tier(self, tier: BlockTier) -> None:
        """Notify ``tier`` of each cached block before it is evicted."""
        assert self._tier is None, "there is a tier already"
        self._tier = tier
        self.pool.on_evict = tier.on_evict

    def cached(self) -> tuple[BlockHash, ...]:
        """Return the hashes of all blocks of the first group here or in the tier; twice if in
        both."""
        keys = self.pool.cached() + (() if self._tier is None else self._tier.cached())
        return keys if self.groups.are_plain else tuple(filter(is_hash, keys))

    def is_cached(self, digest: BlockHash) -> bool:
        if self.pool.find(digest) is not None:
            return True
        return self._tier is not None and self._tier.holds(digest)

    def find_cached_prefix(self, request: Request, max_tokens: int) -> CachedPrefix:
        """Return cached blocks of the request's first tokens, at most ``max_tokens``. Not held."""
        if not self.enable_caching:
            return self.groups.nothing
        hashes = request.hashes_upto(max_tokens // self.block_size)
        return self.groups.longest_prefix(hashes, self.pool.find)

    def find_prefix_with_tier(self, request: Request, max_tokens: int) -> CachedPrefix:
        """Return ``find_cached_prefix`` with blocks that only the tier has: IN_TIER."""
        tier = self._tier
        assert tier is not None, "there is no tier"

        def find(key: BlockHash) -> int | None:
            block = self.pool.find(key)
            return IN_TIER if block is None and tier.holds(key) else block

        hashes = request.hashes_upto(max_tokens // self.block_size)
        return self.groups.longest_prefix(hashes, find)

    def in_tier(
        self, request: Request, prefix: CachedPrefix
    ) -> Iterator[tuple[BlockHash, int, int]]:
        """Yield (key, group, entry of its table) of a prefix's blocks that only the tier has."""
        spans = prefix.num_tokens // self.block_size
        hashes = request.hashes_upto(spans)
        for group, table in zip(self.groups.all, prefix.tables, strict=True):
            for index, block in enumerate(table):
                if block == IN_TIER:
                    yield group.key(hashes[index]), group.index, index
        for group, block in zip(self.groups.states, prefix.snapshots, strict=False):
            if block == IN_TIER:
                yield group.key(hashes[-1]), group.index, 0

    def can_start(
        self,
        prefix: CachedPrefix,
        num_tokens: int,
        *,
        extra: int = 0,
        num_loaded: int = 0,
        keep_spare: bool = False,
    ) -> bool:
        """Return whether ``num_tokens`` tokens and ``extra`` blocks fit, with ``prefix`` reused.
        The KV of the first ``num_loaded`` tokens comes from elsewhere."""
        pool, computed = self.pool, max(prefix.num_tokens, num_loaded)
        need = extra
        for group, hits in zip(self.groups.all, prefix.tables, strict=True):
            first = group.first_needed(computed)
            kept = hits[first:]
            need += max(0, group.num_held(num_tokens, computed) - first - len(kept))
            need += sum(1 for block in kept if block < 0 or pool.is_free(block))
        if prefix.num_tokens == computed:
            need += sum(1 for block in prefix.snapshots if block >= 0 and pool.is_free(block))
        return need + (self.spare if keep_spare else 0) <= pool.num_free

    def start(
        self,
        request: Request,
        prefix: CachedPrefix,
        num_tokens: int,
        *,
        extra: int = 0,
        num_loaded: int = 0,
    ) -> None:
        """Hold ``prefix`` and allocate the rest for a sequence without blocks. ``extra``: spans
        after ``num_tokens``; ``num_loaded`` as for ``can_start``."""
        assert not request.num_blocks, f"sequence {request.seq} starts twice"
        pool, computed = self.pool, max(prefix.num_tokens, num_loaded)
        kept = [
            hits[group.first_needed(computed) :]
            for group, hits in zip(self.groups.all, prefix.tables, strict=True)
        ]
        for hits in kept:
            pool.hold(block for block in hits if block >= 0)
        request.block_tables, request.window_starts, request.cacheable_from = [], [], []
        for group, hits in zip(self.groups.all, kept, strict=True):
            first = group.first_needed(computed)
            # A peer's window may begin within the first block.
            request.cacheable_from.append(first + (first > 0 and not hits))
            table = [NO_BLOCK] * first
            table += [block if block >= 0 else pool.take(1)[0] for block in hits]
            count = group.num_held(num_tokens + extra * self.block_size, computed)
            table += pool.take(max(0, count - len(table)))
            request.block_tables.append(table)
            request.window_starts.append(first)
        if prefix.num_tokens == computed:
            for group, block in zip(self.groups.states, prefix.snapshots, strict=False):
                if block >= 0:
                    pool.hold([block])
                    self._copies[request.block_tables[group.index][0]] = block
        self._note_tables(request, num_cached=_leading_hits(prefix))

    def grow(self, request: Request, num_tokens: int) -> NewBlocks | None:
        """Append blocks so that ``num_tokens`` fit, or of a window the next chunk; release those
        that left a window. Return the new ones, or None if there are too few."""
        if self._is_plain:
            return self._grow_plain(request, num_tokens)
        computed = request.num_computed - request.num_pending_drafts
        self._leave_windows(request, computed)
        needs = [
            max(0, group.num_held(num_tokens, computed) - len(table))
            for group, table in zip(self.groups.tables, request.block_tables, strict=False)
        ]
        if sum(needs) > self.pool.num_free:
            return None
        added = []
        for table, need in zip(request.block_tables, needs, strict=False):
            taken = self.pool.take(need)
            table += taken
            added.append(tuple(taken))
        request.capacity = self._capacity(request)
        return tuple(added)

    def _grow_plain(self, request: Request, num_tokens: int) -> NewBlocks | None:
        (table,) = request.block_tables
        need = blocks_for(num_tokens, self.block_size) - len(table)
        if need > self.pool.num_free:
            return None
        taken = self.pool.take(need)
        table += taken
        request.capacity = len(table) * self.block_size
        return (tuple(taken),)

    def cache_full(self, request: Request) -> None:
        """Cache the full blocks of known and computed tokens."""
        if not self.enable_caching:
            return
        known = min(request.num_computed, len(request.token_ids))
        full = known // self.block_size
        start = request.num_cached_blocks
        if full > start:
            self._cache_spans(request, range(start, full), request.hashes_upto(full))
            request.num_cached_blocks = full
            request.cache_due = (full + 1) * self.block_size

    def _cache_spans(self, request: Request, spans: range, hashes: Sequence[BlockHash]) -> None:
        if self._is_plain:
            (table,) = request.block_tables
            for index in spans:
                self.pool.cache(table[index], hashes[index])
            return
        for group, table in zip(self.groups.tables, request.block_tables, strict=False):
            left = max(request.window_starts[group.index], request.cacheable_from[group.index])
            for index in range(max(spans.start, left), spans.stop):
                self.pool.cache(table[index], group.key(hashes[index]))

    def cache_later(self, request: Request) -> None:
        """Call ``cache_full`` for the present blocks, in case no step will."""
        if self.enable_caching:
            request.cache_due = (request.num_computed // self.block_size + 1) * self.block_size

    def snapshot(self, request: Request, num_tokens: int) -> None:
        """Keep a copy of the states after the first ``num_tokens`` tokens, full spans that the
        coming step computes, unless there is one or no room."""
        states = self.groups.states
        if not (states and self.enable_caching):
            return
        digest = request.hashes_upto(num_tokens // self.block_size)[-1]
        keys = [group.key(digest) for group in states]
        there = all(self.pool.find(key) is not None for key in keys)
        if there or self.pool.num_free < len(keys) + self.spare:
            return
        for group, key in zip(states, keys, strict=True):
            (source,) = request.block_tables[group.index]
            self.pool.hold([source])
            self._planned_snapshots.append(_Snapshot(source, self.pool.take(1)[0], key))

    def truncate(self, request: Request, num_tokens: int) -> None:
        keep = blocks_for(num_tokens, self.block_size)
        for group, table in zip(self.groups.tables, request.block_tables, strict=False):
            first = request.window_starts[group.index]
            self._release(table[max(first, keep) :])
            del table[keep:]
        self._note_tables(request, num_cached=min(request.num_cached_blocks, keep))

    def fork(self, parent: Request, child: Request) -> bool:
        """Share the parent's full blocks with ``child``; copy partial ones and states.

        Return False and do nothing if no blocks are free for the copies.
        """
        full, rest = divmod(parent.num_computed, self.block_size)
        num_copies = len(self.groups.states) + (len(self.groups.tables) if rest else 0)
        if num_copies > self.pool.num_free:
            return False
        child.block_tables, child.window_starts = [], parent.window_starts.copy()
        child.cacheable_from = parent.cacheable_from.copy()
        for group, table in zip(self.groups.all, parent.block_tables, strict=True):
            shared = [] if group.is_state else table[:full]
            self.pool.hold(block for block in shared if block != NO_BLOCK)
            if rest or group.is_state:
                source = table[0 if group.is_state else full]
                (copy,) = self.pool.take(1)
                self.pool.hold([source])
                self._copies[copy] = source
                shared.append(copy)
            child.block_tables.append(shared)
        self._note_tables(child, num_cached=min(parent.num_cached_blocks, full))
        return True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return (source, destination) of the copies that the next plan must carry."""
        if not (self._copies or self._snapshots or self._planned_snapshots):
            return ()
        pairs = [(source, copy) for copy, source in self._copies.items()]
        self._copies.clear()
        self.pool.release(source for source, _ in pairs)
        for source, to, key in self._snapshots:
            pairs.append((source, to))
            self.pool.cache(to, key)
            self.pool.release((source, to))
        self._snapshots, self._planned_snapshots = self._planned_snapshots, []
        return tuple(pairs)

    def free(self, request: Request) -> None:
        """Release all blocks, the last first, so that tails are evicted before heads."""
        self._release(self.pin_for_transfer(request))

    def pin_for_transfer(self, request: Request) -> list[int]:
        """Return the request's blocks, which stay held until ``unpin``."""
        blocks = held_blocks(request.block_tables)
        request.block_tables, request.window_starts = [], []
        self._note_tables(request, num_cached=0)
        return blocks

    def lend(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """Return the cached blocks of the longest start of ``hashes``, held until ``unpin``. The
        table of a state is its snapshot."""
        if not self.enable_caching:
            return self.groups.nothing
        prefix = self.groups.longest_prefix(hashes, self.pool.find)
        tables = list(prefix.tables)
        for group, block in zip(self.groups.states, prefix.snapshots, strict=False):
            tables[group.index] = [block]
        self.pool.hold(held_blocks(tables))
        return CachedPrefix(prefix.num_tokens, tuple(tables))

    def unpin(self, blocks: Sequence[int]) -> None:
        """Release blocks of ``pin_for_transfer`` or ``lend``."""
        self._release(blocks)

    def reset_prefix_cache(self) -> int:
        """Drop all cached blocks that are not held, and the tier's; return their number."""
        dropped = self.pool.forget_free()
        return dropped if self._tier is None else dropped + self._tier.reset()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise IntegrityError unless only ``held`` and pending copies hold blocks."""
        holders = Counter(block for blocks in held for block in blocks)
        holders.update(self._copies.values())
        for each in (*self._snapshots, *self._planned_snapshots):
            holders.update((each.source, each.to))
        self.pool.check(holders)

    def check_count(self, num_held: int) -> None:
        """Raise IntegrityError unless all blocks but ``num_held`` are free."""
        expected = self.pool.num_blocks - num_held
        if self.num_free != expected and not self.num_copying:
            raise IntegrityError(f"{self.num_free} blocks are free, but {expected} should be")

    def _leave_windows(self, request: Request, computed: int) -> None:
        """Release the blocks that no later token reads; cached ones stay cached."""
        for group in self.groups.tables:
            first, start = group.first_needed(computed), request.window_starts[group.index]
            if first > start:
                self.cache_full(request)
                table = request.block_tables[group.index]
                self._release(table[start:first])
                table[start:first] = [NO_BLOCK] * (first - start)
                request.window_starts[group.index] = first

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks if self._copies else ():
            if block in self._copies:  # the copy has no reader
                self.pool.release([self._copies.pop(block)])
        self.pool.release(reversed(blocks))

    def _capacity(self, request: Request) -> int:
        spans = min(map(len, request.block_tables[: len(self.groups.tables)]), default=0)
        return spans * self.block_size

    def _note_tables(self, request: Request, *, num_cached: int) -> None:
        request.capacity = self._capacity(request)
        request.num_cached_blocks = num_cached
        due = (num_cached + 1) * self.block_size
        request.cache_due = due if self.enable_caching else NEVER


def held_blocks(tables: Sequence[Sequence[int]]) -> list[int]:
    """Return the blocks of tables by span."""
    if len(tables) == 1 and NO_BLOCK not in tables[0]:
        return list(tables[0])
    spans = max(map(len, tables), default=0)
    return [
        table[span]
        for span in range(spans)
        for table in tables
        if span < len(table) and table[span] != NO_BLOCK
    ]


def _leading_hits(prefix: CachedPrefix) -> int:
    """Return the spans before the first block that only the tier has."""
    return (
        min(
            table.index(IN_TIER) if IN_TIER in table else len(table)
            for table in prefix.tables
            if table
        )
        if prefix.num_tokens
        else 0
    )
