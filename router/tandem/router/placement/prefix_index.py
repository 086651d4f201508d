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
LET_GO = 16_384
"""Blocks of workers that are gone, at once, at most: a millisecond or two. It is half of that at
least, more than a part of a worker's picture brings: both together stay within the bound."""
SPLIT = 32_768
"""Blocks of a worker from which on they are kept in ``SHARDS`` dicts: a dict of millions moves all
its entries when it grows, 180 to 280 ms for which every stream waits."""
SHARDS = 256
"""By a hash's last byte; each grows by itself, in about a millisecond at eight million blocks."""
FULL = 7 / 8
"""Of the bound: below this share nobody is made young, which takes as long again as looking up."""


class PrefixIndex:
    """Per worker a set of block hashes in the order in which they were stored or asked for."""

    def __init__(self, max_bytes: int) -> None:
        self.max_entries = max(1, max_bytes // ENTRY_BYTES)
        self._caches: dict[Incarnation, _Cache] = {}
        self._count = 0
        self._leaving: list[dict[BlockHash, int]] = []
        """Of workers that are gone, and not in ``len``. To let five million blocks go takes 200 to
        500 ms."""

    def __len__(self) -> int:
        """Entries over all workers."""
        return self._count

    def apply(self, worker: Incarnation, events: BlockEvents) -> None:
        """Take a worker's news: cleared first, then stored, then removed."""
        self.tidy()  # no slower than others take their place
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
        """The worker is gone, or its cache is."""
        cache = self._caches.pop(worker, None)
        if cache is not None:
            self._count -= len(cache)
            self._leaving += cache.shards

    def tidy(self) -> None:
        """Let some go of what was dropped: with each news, and now and then where there are none.
        One dict at least; of more than one ``LET_GO`` blocks at most."""
        leaving, blocks = self._leaving, 0
        while leaving and (not blocks or blocks + len(leaving[-1]) <= LET_GO):
            blocks += len(leaving.pop()) or 1

    def hits(self, worker: Incarnation, hashes: Sequence[BlockHash]) -> int:
        """How many of the first ``hashes`` the worker has, without a gap."""
        cache = self._caches.get(worker)
        if cache is None:
            return 0
        found = cache.begins(hashes)
        if found and self._count >= FULL * self.max_entries:  # else nothing is forgotten soon
            cache.asked_for(hashes, found)
        return found

    def _forget_oldest(self) -> None:
        cache = max(self._caches.values(), key=_Cache.__len__)
        self._count -= cache.forget_oldest()


class _Cache:
    """Of one worker, the oldest block first: in each shard, which are alike since hashes are."""

    __slots__ = ("_added", "_age", "_count", "_mask", "_next", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[BlockHash, int]] = [{}]
        """With the age of this object when each was last added."""
        self._mask = 0
        self._count = 0
        self._age = 0
        """In parts of the blocks that were added. A number is one object for many blocks."""
        self._added = 0
        self._next = 0
        """Shard whose turn to forget it is."""

    def __len__(self) -> int:
        return self._count

    def begins(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first ``hashes`` are here, without a gap."""
        shards, mask = self.shards, self._mask
        for index, block in enumerate(hashes):
            if block not in shards[block[-1] & mask]:
                return index
        return len(hashes)

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """These are the youngest, the last one above all."""
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
        """These are here no more."""
        shards, mask = self.shards, self._mask
        for block in hashes:
            if shards[block[-1] & mask].pop(block, None) is not None:
                self._count -= 1

    def asked_for(self, hashes: Sequence[BlockHash], found: int) -> None:
        """Make the first ``found`` of these young again, if half of all that is here is younger
        than either end of them: seldom, since it takes longer than looking them up."""
        ends = (hashes[0], hashes[found - 1])
        oldest = min(self.shards[block[-1] & self._mask][block] for block in ends)
        if self._age - oldest >= PARTS // 2:
            self.add(reversed(hashes[:found]))

    def forget_oldest(self) -> int:
        """A part of them goes, so that the search for whose pays; how many."""
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
        """Into as many dicts as there will ever be, each in the order in which all were."""
        (whole,) = self.shards
        self.shards, self._mask = [{} for _ in range(SHARDS)], SHARDS - 1
        for block, age in whole.items():
            self.shards[block[-1] & self._mask][block] = age
