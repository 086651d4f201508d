"""Block tables of sequences: prefix hits, allocation, sharing between choices, freeing.

The only writer of ``Request.block_ids``. The scheduler decides; copies of blocks are collected for
the next plan.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from tandem.engine.cache.block_pool import BlockEventLog, BlockPool, IntegrityError
from tandem.engine.request import Request
from tandem.protocol.card import KVGroup, KVLayout, blocks_for
from tandem.protocol.errors import InvalidParameter
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


class KVCacheManager:
    """KV blocks of one engine."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool = True,
        watermark: float = 0.0,
    ) -> None:
        self.log = BlockEventLog()
        self.pool = BlockPool(num_blocks, self.log)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.spare = int(watermark * num_blocks)
        """Blocks that a start leaves free while others run, so that preemptions are rare."""
        self._tier: BlockTier | None = None
        self._copies: dict[int, int] = {}
        """Destination to source of copies for the next plan; sources are held until then."""

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Return the share of the blocks that are held, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def attach_tier(self, tier: BlockTier) -> None:
        """Notify ``tier`` of each cached block before it is evicted."""
        assert self._tier is None, "there is a tier already"
        self._tier = tier
        self.pool.on_evict = tier.on_evict

    def cached(self) -> tuple[BlockHash, ...]:
        """Return the hashes of all blocks here or in the tier; twice if in both."""
        own = self.pool.cached()
        return own if self._tier is None else own + self._tier.cached()

    def is_cached(self, digest: BlockHash) -> bool:
        if self.pool.find(digest) is not None:
            return True
        return self._tier is not None and self._tier.holds(digest)

    def find_cached_prefix(self, request: Request, max_tokens: int) -> list[int]:
        """Return cached blocks of the request's first tokens, at most ``max_tokens``. Not held."""
        if not self.enable_caching:
            return []
        hits = []
        find = self.pool.find
        for digest in request.hashes_upto(max_tokens // self.block_size):
            block = find(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def can_start(
        self, hits: Sequence[int], num_tokens: int, *, extra: int = 0, keep_spare: bool = False
    ) -> bool:
        """Return whether ``num_tokens`` tokens and ``extra`` blocks fit, with ``hits`` reused."""
        pool = self.pool
        need = blocks_for(num_tokens, self.block_size) + extra - len(hits)
        need += sum(1 for block in hits if pool.is_free(block))
        return need + (self.spare if keep_spare else 0) <= pool.num_free

    def start(
        self, request: Request, hits: Sequence[int], num_tokens: int, *, extra: int = 0
    ) -> None:
        """Hold ``hits`` and allocate the rest for a sequence without blocks."""
        assert not request.block_ids, f"sequence {request.seq} starts twice"
        self.pool.hold(hits)
        count = blocks_for(num_tokens, self.block_size) + extra - len(hits)
        request.block_ids = [*hits, *self.pool.take(max(0, count))]
        self._note_table(request, num_cached=len(hits))

    def grow(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Append blocks so that ``num_tokens`` fit; return them, or None if there are too few."""
        need = blocks_for(num_tokens, self.block_size) - len(request.block_ids)
        if need > self.pool.num_free:
            return None
        taken = self.pool.take(need)
        request.block_ids += taken
        request.capacity = len(request.block_ids) * self.block_size
        return tuple(taken)

    def cache_full(self, request: Request) -> None:
        """Cache the full blocks of known and computed tokens."""
        if not self.enable_caching:
            return
        known = min(request.num_computed, len(request.token_ids))
        full = known // self.block_size
        start = request.num_cached_blocks
        if full > start:
            hashes = request.hashes_upto(full)
            for index in range(start, full):
                self.pool.cache(request.block_ids[index], hashes[index])
            request.num_cached_blocks = full
            request.cache_due = (full + 1) * self.block_size

    def cache_later(self, request: Request) -> None:
        """Call ``cache_full`` for the present blocks, in case no step will."""
        if self.enable_caching:
            request.cache_due = (request.num_computed // self.block_size + 1) * self.block_size

    def truncate(self, request: Request, num_tokens: int) -> None:
        keep = blocks_for(num_tokens, self.block_size)
        self._release(request.block_ids[keep:])
        request.block_ids = request.block_ids[:keep]
        self._note_table(request, num_cached=min(request.num_cached_blocks, keep))

    def fork(self, parent: Request, child: Request) -> bool:
        """Share the parent's full blocks with ``child`` and copy a partial one.

        Return False and do nothing if no block is free for the copy.
        """
        full, rest = divmod(parent.num_computed, self.block_size)
        if rest and not self.pool.num_free:
            return False
        shared = parent.block_ids[:full]
        self.pool.hold(shared)
        child.block_ids = list(shared)
        if rest:
            source = parent.block_ids[full]
            (copy,) = self.pool.take(1)
            self.pool.hold([source])
            self._copies[copy] = source
            child.block_ids.append(copy)
        self._note_table(child, num_cached=min(parent.num_cached_blocks, full))
        return True

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return (source, destination) of the copies that the next plan must carry."""
        if not self._copies:
            return ()
        pairs = tuple((source, copy) for copy, source in self._copies.items())
        self._copies.clear()
        self.pool.release(source for source, _ in pairs)
        return pairs

    def free(self, request: Request) -> None:
        """Release all blocks, the last first, so that tails are evicted before heads."""
        self._release(request.block_ids)
        request.block_ids = []
        self._note_table(request, num_cached=0)

    def pin_for_transfer(self, request: Request) -> list[int]:
        """Return the request's blocks, which stay held until ``unpin``."""
        blocks, request.block_ids = request.block_ids, []
        self._note_table(request, num_cached=0)
        return blocks

    def lend(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the cached blocks of the longest start of ``hashes``, held until ``unpin``."""
        found: list[int] = []
        for digest in hashes if self.enable_caching else ():
            block = self.pool.find(digest)
            if block is None:
                break
            found.append(block)
        self.pool.hold(found)
        return found

    def unpin(self, blocks: Sequence[int]) -> None:
        """Release blocks of ``pin_for_transfer`` or ``lend``."""
        self._release(blocks)

    def reset_prefix_cache(self) -> int:
        """Drop all cached blocks that are not held, and the tier's; return their number."""
        dropped = self.pool.forget_free()
        return dropped if self._tier is None else dropped + self._tier.reset()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise IntegrityError unless only ``tables`` and pending copies hold blocks."""
        holders = Counter(block for table in tables for block in table)
        holders.update(self._copies.values())
        self.pool.check(holders)

    def check_count(self, num_held: int) -> None:
        """Raise IntegrityError unless all blocks but ``num_held`` are free."""
        expected = self.pool.num_blocks - num_held
        if self.num_free != expected and not self._copies:
            raise IntegrityError(f"{self.num_free} blocks are free, but {expected} should be")

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks if self._copies else ():
            if block in self._copies:  # the copy has no reader
                self.pool.release([self._copies.pop(block)])
        self.pool.release(reversed(blocks))

    def _note_table(self, request: Request, *, num_cached: int) -> None:
        request.capacity = len(request.block_ids) * self.block_size
        request.num_cached_blocks = num_cached
        due = (num_cached + 1) * self.block_size
        request.cache_due = due if self.enable_caching else NEVER


def only_group(layout: KVLayout) -> KVGroup:
    """Return the layers' only block shape. Raises InvalidParameter unless there is exactly one."""
    if len(layout.groups) != 1:
        raise InvalidParameter("layout.groups", len(layout.groups), "exactly one group of layers")
    return layout.groups[0]
