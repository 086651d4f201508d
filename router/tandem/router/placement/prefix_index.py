"""Which worker has which blocks cached, as far as its events told. Bounded by memory.

A wrong entry costs a recomputed block, never a wrong token: the worker looks for itself. So the
bound simply forgets what was neither stored nor asked for for longest, of the worker that holds
most. A chain's first blocks are never told of again while prompts go on sharing them, and without
them the rest of it is no hit: of what is asked for they are the youngest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.outputs import BlockEvents

ENTRY_BYTES = 128
"""A 16-byte hash as a key: 91 measured at a million, and what allocator and growth add."""
PARTS = 16
"""Of a worker's blocks: one is forgotten at a time, and so many new ones make one older."""
MOST_FORGOTTEN = 16_384
"""Blocks at once, at most: streams wait for it."""
FULL = 7 / 8
"""Of the bound: below this share nobody is made young, which takes as long again as looking up."""


class PrefixIndex:
    """Per worker a set of block hashes in the order in which they were stored or asked for."""

    def __init__(self, max_bytes: int) -> None:
        self.max_entries = max(1, max_bytes // ENTRY_BYTES)
        self._caches: dict[Incarnation, _Cache] = {}
        self._count = 0

    def __len__(self) -> int:
        """Entries over all workers."""
        return self._count

    def apply(self, worker: Incarnation, events: BlockEvents) -> None:
        """Take a worker's news: cleared first, then stored, then removed."""
        if events.cleared:
            self.drop(worker)
        cache = self._caches.setdefault(worker, _Cache())
        before = len(cache.blocks)
        cache.add(events.stored)
        for block in events.removed:
            cache.blocks.pop(block, None)
        self._count += len(cache.blocks) - before
        while self._count > self.max_entries:
            self._forget_oldest()

    def drop(self, worker: Incarnation) -> None:
        """The worker is gone, or its cache is."""
        cache = self._caches.pop(worker, None)
        self._count -= 0 if cache is None else len(cache.blocks)

    def hits(self, worker: Incarnation, hashes: Sequence[BlockHash]) -> int:
        """How many of the first ``hashes`` the worker has, without a gap."""
        cache = self._caches.get(worker)
        if cache is None:
            return 0
        blocks = cache.blocks
        found = len(hashes)
        for index, block in enumerate(hashes):
            if block not in blocks:
                found = index
                break
        if found and self._count >= FULL * self.max_entries:  # else nothing is forgotten soon
            cache.asked_for(hashes, found)
        return found

    def _forget_oldest(self) -> None:
        cache = max(self._caches.values(), key=_Cache.__len__)
        self._count -= cache.forget_oldest()


class _Cache:
    """Of one worker, the oldest block first."""

    __slots__ = ("_added", "_age", "blocks")

    def __init__(self) -> None:
        self.blocks: dict[BlockHash, int] = {}
        """With the age of this object when each was last added."""
        self._age = 0
        """In parts of the blocks that were added. A number is one object for many blocks."""
        self._added = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """These are the youngest, the last one above all."""
        blocks, age = self.blocks, self._age
        for block in hashes:
            blocks.pop(block, None)
            blocks[block] = age
            self._added += 1
        parts, self._added = divmod(self._added, max(1, len(blocks) // PARTS))
        self._age += parts

    def asked_for(self, hashes: Sequence[BlockHash], found: int) -> None:
        """Make the first ``found`` of these young again, if half of all that is here is younger
        than either end of them: seldom, since it takes longer than looking them up."""
        oldest = min(self.blocks[hashes[0]], self.blocks[hashes[found - 1]])
        if self._age - oldest >= PARTS // 2:
            self.add(reversed(hashes[:found]))

    def forget_oldest(self) -> int:
        """A part of them goes, so that the search for whose pays; how many."""
        share = max(1, min(MOST_FORGOTTEN, len(self.blocks) // PARTS))
        for block in list(islice(self.blocks, share)):
            del self.blocks[block]
        return share
