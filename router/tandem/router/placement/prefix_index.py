"""Blocks that each worker has cached, from its events. Bounded by memory.

Wrong entries only cost recomputation. Above the bound, the least recently used blocks of the
largest worker are dropped. A chain's first blocks count as the most recent: the rest is useless
without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.outputs import BlockEvents

ENTRY_BYTES = 128
"""Memory of a 16-byte hash as a key."""
PARTS = 16
"""Number of parts of a worker's blocks. Blocks are dropped one part after another."""
MOST_FORGOTTEN = 16_384
"""Maximum blocks that are dropped at once."""
LET_GO = 16_384
"""Maximum blocks of lost workers that are freed at once.

At least half of it is freed, more than one message adds.
"""
SPLIT = 32_768
"""Blocks of a worker above which they are in ``SHARDS`` dicts.

A large dict blocks all streams while it grows.
"""
SHARDS = 256
"""Number of dicts, by a hash's last byte."""
FULL = 7 / 8
"""Share of the bound below which requested blocks are not moved."""


class PrefixIndex:
    """Set of block hashes per worker, in order of use."""

    def __init__(self, max_bytes: int) -> None:
        self.max_entries = max(1, max_bytes // ENTRY_BYTES)
        self._caches: dict[Incarnation, _Cache] = {}
        self._count = 0
        self._leaving: list[dict[BlockHash, int]] = []
        """Blocks of lost workers, which are freed in parts and not counted."""

    def __len__(self) -> int:
        return self._count

    def apply(self, worker: Incarnation, events: BlockEvents) -> None:
        """Apply a worker's events: cleared, stored, removed."""
        self.tidy()  # no slower than others are added
        if events.cleared:
            self.drop(worker)
        cache = self._caches.setdefault(worker, _Cache())
        before = len(cache)
        cache.add(events.stored)
        cache.remove(events.removed)
        self._count += len(cache) - before
        while self._count > self.max_entries:
            self._forget_oldest()

    def drop(self, worker: Incarnation) -> None:
        cache = self._caches.pop(worker, None)
        if cache is not None:
            self._count -= len(cache)
            self._leaving += cache.shards

    def tidy(self) -> None:
        """Free dropped blocks: at least one dict, of several at most ``LET_GO`` blocks.

        Called with each event, and periodically.
        """
        leaving, blocks = self._leaving, 0
        while leaving and (not blocks or blocks + len(leaving[-1]) <= LET_GO):
            blocks += len(leaving.pop()) or 1

    def hits(self, worker: Incarnation, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the first ``hashes`` the worker has, without a gap."""
        cache = self._caches.get(worker)
        if cache is None:
            return 0
        found = cache.begins(hashes)
        if found and self._count >= FULL * self.max_entries:  # else nothing is dropped soon
            cache.asked_for(hashes, found)
        return found

    def _forget_oldest(self) -> None:
        cache = max(self._caches.values(), key=_Cache.__len__)
        self._count -= cache.forget_oldest()


class _Cache:
    """Blocks of one worker, the oldest first in each shard."""

    __slots__ = ("_added", "_age", "_count", "_mask", "_next", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[BlockHash, int]] = [{}]
        """Blocks with their ages."""
        self._mask = 0
        self._count = 0
        self._age = 0
        """Current age, shared by many blocks."""
        self._added = 0
        self._next = 0
        """Next shard that drops blocks."""

    def __len__(self) -> int:
        return self._count

    def begins(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the first ``hashes`` are cached, without a gap."""
        shards, mask = self.shards, self._mask
        for index, block in enumerate(hashes):
            if block not in shards[block[-1] & mask]:
                return index
        return len(hashes)

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """Add blocks as the youngest, the last one first."""
        shards, mask, age = self.shards, self._mask, self._age
        for block in hashes:
            shard = shards[block[-1] & mask]
            if shard.pop(block, None) is None:
                self._count += 1
            shard[block] = age
            self._added += 1
        parts, self._added = divmod(self._added, max(1, self._count // PARTS))
        self._age += parts
        if mask == 0 and self._count > SPLIT:
            self._split()

    def remove(self, hashes: Iterable[BlockHash]) -> None:
        shards, mask = self.shards, self._mask
        for block in hashes:
            if shards[block[-1] & mask].pop(block, None) is not None:
                self._count -= 1

    def asked_for(self, hashes: Sequence[BlockHash], found: int) -> None:
        """Make the first ``found`` blocks the youngest, if half of all blocks are younger."""
        ends = (hashes[0], hashes[found - 1])
        oldest = min(self.shards[block[-1] & self._mask][block] for block in ends)
        if self._age - oldest >= PARTS // 2:
            self.add(reversed(hashes[:found]))

    def forget_oldest(self) -> int:
        """Remove a part of the blocks, and return their number."""
        share = max(1, min(MOST_FORGOTTEN, self._count // PARTS))
        each, gone = -(-share // len(self.shards)), 0
        while gone < share:
            shard = self.shards[self._next]
            self._next = (self._next + 1) % len(self.shards)
            for block in list(islice(shard, min(each, share - gone))):
                del shard[block]
                gone += 1
        self._count -= gone
        return gone

    def _split(self) -> None:
        (whole,) = self.shards
        self.shards, self._mask = [{} for _ in range(SHARDS)], SHARDS - 1
        for block, age in whole.items():
            self.shards[block[-1] & self._mask][block] = age
