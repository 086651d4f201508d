"""Which worker has which blocks cached, as far as its events told. Bounded by memory.

A wrong entry costs a recomputed block, never a wrong token: the worker looks for itself. So the
bound simply forgets what was stored longest ago, of the worker that holds most.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.outputs import BlockEvents

ENTRY_BYTES = 128
"""A 16-byte hash as a key: 91 measured at a million, and what allocator and growth add."""


class PrefixIndex:
    """Per worker a set of block hashes in the order in which they were stored."""

    def __init__(self, max_bytes: int) -> None:
        self.max_entries = max(1, max_bytes // ENTRY_BYTES)
        self._blocks: dict[Incarnation, dict[BlockHash, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Entries over all workers."""
        return self._count

    def apply(self, worker: Incarnation, events: BlockEvents) -> None:
        """Take a worker's news: cleared first, then stored, then removed."""
        if events.cleared:
            self.drop(worker)
        blocks = self._blocks.setdefault(worker, {})
        before = len(blocks)
        for block in events.stored:
            blocks.pop(block, None)  # stored again: youngest again
            blocks[block] = None
        for block in events.removed:
            blocks.pop(block, None)
        self._count += len(blocks) - before
        while self._count > self.max_entries:
            self._forget_oldest()

    def drop(self, worker: Incarnation) -> None:
        """The worker is gone, or its cache is."""
        self._count -= len(self._blocks.pop(worker, ()))

    def hits(self, worker: Incarnation, hashes: Sequence[BlockHash]) -> int:
        """How many of the first ``hashes`` the worker has, without a gap."""
        blocks = self._blocks.get(worker)
        if not blocks:
            return 0
        for index, block in enumerate(hashes):
            if block not in blocks:
                return index
        return len(hashes)

    def _forget_oldest(self) -> None:
        blocks = max(self._blocks.values(), key=len)
        share = max(1, len(blocks) // 16)  # some at once, so that the search pays
        for block in list(blocks)[:share]:
            del blocks[block]
        self._count -= share
