"""Snapshots of the prefix cache for routers that have just connected, sent in parts.

A whole cache in one frame would exceed the link's bound and block the router's loop. A part has
only hashes cached when it is sent, so no block is reported after its removal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.outputs import BlockEvents

PART_BLOCKS = 4_096
"""Blocks of one part: 74 kB."""
PAUSE_SECONDS = 0.025
"""Minimum pause between two parts, which leaves the router time for its streams."""


class Cache(Protocol):
    """Engine interface that the snapshots read."""

    def cached_blocks(self) -> BlockEvents: ...

    def still_cached(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]: ...


@dataclass(slots=True)
class _Snapshot:
    hashes: tuple[BlockHash, ...]
    num_sent: int


class CacheSnapshots:
    """Unfinished snapshots, for the step loop only."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._cache_snapshots: dict[Incarnation, _Snapshot] = {}
        self._next = math.inf
        """Time of the next parts; inf while no router waits."""

    def begin(self, router: Incarnation, now: float) -> BlockEvents:
        """Return the first part, which replaces the router's view of the cache. ``now`` is of
        ``time.monotonic``."""
        hashes = self._cache.cached_blocks().stored
        self.forget(router)
        if len(hashes) > PART_BLOCKS:
            self._cache_snapshots[router] = _Snapshot(hashes, PART_BLOCKS)
            self._next = min(self._next, now + PAUSE_SECONDS)
        return BlockEvents(stored=hashes[:PART_BLOCKS], cleared=True)

    def forget(self, router: Incarnation) -> None:
        self._cache_snapshots.pop(router, None)

    def seconds(self, now: float) -> float:
        """Return the seconds until a part is due; inf if none is left."""
        return max(0.0, self._next - now)

    def parts(self, now: float) -> Iterator[tuple[Incarnation, BlockEvents]]:
        """Return the next part for each router that waits, once it is due."""
        if now < self._next:
            return
        for router, snapshot in list(self._cache_snapshots.items()):
            part = snapshot.hashes[snapshot.num_sent : snapshot.num_sent + PART_BLOCKS]
            snapshot.num_sent += PART_BLOCKS
            if snapshot.num_sent >= len(snapshot.hashes):
                self.forget(router)
            yield router, BlockEvents(stored=self._cache.still_cached(part))
        self._next = now + PAUSE_SECONDS if self._cache_snapshots else math.inf
