"""Cached blocks lent to a peer.

They are held under a key, as those of an ended request, until ``Released``. Called in the step
loop, while a connector is polled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.cache.manager import held_blocks
from tandem.engine.scheduler.scheduler import Scheduler
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.kv import BlockTables, Fence, frozen


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks of a prompt's start; not written or freed before the key's ``Released``."""

    tables: BlockTables
    """Blocks by group."""
    num_tokens: int
    fence: Fence
    """Done when the blocks hold their content: a step in flight may write them."""


class CachedPrefixes:
    """Lends blocks of one engine's prefix cache."""

    def __init__(self, scheduler: Scheduler, *, closed: Callable[[], bool] = lambda: False) -> None:
        """``closed``: whether the engine accepts nothing new, and lends nothing."""
        self._scheduler = scheduler
        self.closed = closed

    @property
    def block_size(self) -> int:
        return self._scheduler.manager.block_size

    @property
    def num_blocks(self) -> int:
        return self._scheduler.manager.pool.num_blocks

    @property
    def is_short(self) -> bool:
        """Return whether the first of the queue or of the hand-offs finds too few free blocks."""
        request_table, manager = self._scheduler.request_table, self._scheduler.manager
        first = request_table.waiting.peek()
        if request_table.is_short or first is None:
            return request_table.is_short
        hits = manager.find_cached_prefix(first, first.max_cached_tokens)
        return not manager.can_start(hits, len(first.token_ids), keep_spare=request_table.busy)

    def lend(self, key: RequestKey, hashes: Sequence[BlockHash]) -> Loan | None:
        """Lend the longest cached start of these blocks. Return None if none is cached or the key
        is in use."""
        scheduler = self._scheduler
        held = scheduler.request_table.held
        if scheduler.holds(key) or key in held:
            return None
        prefix = scheduler.manager.lend(hashes)
        if not prefix.num_tokens:
            return None
        held[key] = held_blocks(prefix.tables)
        return Loan(frozen(prefix.tables), prefix.num_tokens, scheduler.flow.behind_planned())
