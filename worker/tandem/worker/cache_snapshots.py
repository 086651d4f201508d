"""Snapshots of the prefix cache for routers that have just connected, sent in parts.

The whole cache may be millions of hashes. In one frame they exceed the link's bound, and a router's
loop stands still while it reads them. Changes in the meantime go to these routers as to all others.
A part contains only hashes that are cached when it is sent, so no block is reported after its
removal. A router with some of the parts places some prompts as if none of their blocks were here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.outputs import BlockEvents

PART_BLOCKS = 4_096
"""Blocks of one part: 74 kB, and a millisecond of a router's loop."""
PAUSE_SECONDS = 0.025
"""Least pause between two parts. Twenty workers that a router finds at once leave it time for its
streams, and a million blocks take some seconds."""


class Cache(Protocol):
    """Engine interface that the snapshots read."""

    def cached_blocks(self) -> BlockEvents:
        """Return all hashes of the prefix cache."""
        ...

    def still_cached(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Return those of ``hashes`` that are cached now."""
        ...


@dataclass(slots=True)
class _Snapshot:
    """Snapshot of the cache at the time that its router connected."""

    hashes: tuple[BlockHash, ...]
    told: int


class CacheSnapshots:
    """Snapshots that are not sent completely yet. For the step loop alone."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._cache_snapshots: dict[Incarnation, _Snapshot] = {}
        self._next = math.inf
        """Time at which parts are due again; inf while no router waits."""

    def begin(self, router: Incarnation, now: float) -> BlockEvents:
        """Return the first part, which replaces the router's view of the cache. The rest follows.
        ``now`` is of ``time.monotonic``, here and below."""
        hashes = self._cache.cached_blocks().stored
        self.forget(router)
        if len(hashes) > PART_BLOCKS:
            self._cache_snapshots[router] = _Snapshot(hashes, PART_BLOCKS)
            self._next = min(self._next, now + PAUSE_SECONDS)
        return BlockEvents(stored=hashes[:PART_BLOCKS], cleared=True)

    def forget(self, router: Incarnation) -> None:
        """Drop the snapshot of a router that is gone. Unknown routers are ignored."""
        self._cache_snapshots.pop(router, None)

    def seconds(self, now: float) -> float:
        """Return the seconds until ``parts`` has a part to send; inf if none is left."""
        return max(0.0, self._next - now)

    def parts(self, now: float) -> Iterator[tuple[Incarnation, BlockEvents]]:
        """Return the next part for each router that waits, once it is due."""
        if now < self._next:
            return
        for router, snapshot in list(self._cache_snapshots.items()):
            part = snapshot.hashes[snapshot.told : snapshot.told + PART_BLOCKS]
            snapshot.told += PART_BLOCKS
            if snapshot.told >= len(snapshot.hashes):
                self.forget(router)
            yield router, BlockEvents(stored=self._cache.still_cached(part))
        self._next = now + PAUSE_SECONDS if self._cache_snapshots else math.inf
