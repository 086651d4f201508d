"""Cached blocks for somebody beside the engine: found by hash, held, given back by ``Released``.

A peer that pulls a prefix reads blocks that nobody computes for it. They are held under a key as
those of a request that is gone are, so that the same accounts, checks and ends hold for both.
Called in the step loop, while a connector is polled.
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
    """Done when they hold what they are cached as: the step that writes them may be under way."""


class CachedPrefixes:
    """One engine's prefix cache, to be lent from."""

    def __init__(self, scheduler: Scheduler, *, closed: Callable[[], bool] = lambda: False) -> None:
        """``closed``: whether the engine takes nothing new, and lends nothing."""
        self._scheduler = scheduler
        self.closed = closed

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._scheduler.manager.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""
        return self._scheduler.manager.pool.num_blocks

    @property
    def is_short(self) -> bool:
        """Whether who goes first here, of the queue or of hand-offs, finds too few blocks free."""
        roster, manager = self._scheduler.roster, self._scheduler.manager
        first = roster.waiting.peek()
        if roster.is_short or first is None:
            return roster.is_short
        hits = manager.find_cached_prefix(first, first.max_cached_tokens)
        return not manager.can_start(hits, len(first.token_ids), keep_spare=roster.busy)

    def lend(self, key: RequestKey, hashes: Sequence[BlockHash]) -> Loan | None:
        """What is cached of these leading blocks, without a gap; None when nothing is, or the key
        is in use already: then nothing is held."""
        scheduler = self._scheduler
        held = scheduler.roster.held
        if scheduler.holds(key) or key in held:
            return None
        blocks = scheduler.manager.lend(hashes)
        if not blocks:
            return None
        held[key] = blocks
        return Loan(tuple(blocks), scheduler.flow.behind_planned())
