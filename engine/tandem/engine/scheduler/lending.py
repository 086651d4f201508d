"""Cached blocks lent to a peer: found by hash, held, given back by ``Released``.

A peer that pulls a prefix reads blocks that are not computed for it. They are held under a key, as
those of an ended request are, so that the same accounts, checks and ends apply. Called in the step
loop, while a connector is polled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.engine.scheduler.scheduler import Scheduler
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.kv import Fence


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks of a prompt's start; not written or freed before the key's ``Released``."""

    block_ids: tuple[int, ...]
    fence: Fence
    """Done when the blocks hold their cached content: the step that writes them may be in
    flight."""


class CachedPrefixes:
    """Lends blocks of one engine's prefix cache."""

    def __init__(self, scheduler: Scheduler, *, closed: Callable[[], bool] = lambda: False) -> None:
        """``closed``: whether the engine accepts nothing new, and lends nothing."""
        self._scheduler = scheduler
        self.closed = closed

    @property
    def block_size(self) -> int:
        """Return the tokens of a block."""
        return self._scheduler.manager.block_size

    @property
    def num_blocks(self) -> int:
        """Return the number of the engine's blocks."""
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
        """Lend the cached blocks among these leading ones, without a gap. Return None and hold
        nothing if none is cached or the key is in use."""
        scheduler = self._scheduler
        held = scheduler.request_table.held
        if scheduler.holds(key) or key in held:
            return None
        blocks = scheduler.manager.lend(hashes)
        if not blocks:
            return None
        held[key] = blocks
        return Loan(tuple(blocks), scheduler.flow.behind_planned())
