"""What routers that have just come are yet to hear of the prefix cache, a part at a time.

All of it may be millions of hashes: in one frame they are more than a link takes, and a router's
loop stands still while it reads them. What changes meanwhile goes to these routers as to all
others. A part has what is cached as it goes, so that no block is told of behind the word that it is
gone; a router that has heard only some of it places some prompts as if nothing of theirs was here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.outputs import BlockEvents

PART_BLOCKS = 4_096
"""Of one part: 74 kB, and a millisecond of a router's loop."""
PAUSE_SECONDS = 0.025
"""Between two parts, at least: twenty workers that a router finds at once leave it time for its
streams, and a million blocks take some seconds."""


class Cache(Protocol):
    """The engine, as far as it is looked at here."""

    def cached_blocks(self) -> BlockEvents:
        """All of the prefix cache."""
        ...

    def still_cached(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Those of these that are in it now."""
        ...


@dataclass(slots=True)
class _Picture:
    """As it was when its router came."""

    hashes: tuple[BlockHash, ...]
    told: int


class Pictures:
    """For the step loop alone."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._pictures: dict[Incarnation, _Picture] = {}
        self._next = math.inf
        """When parts are due again; never while no router waits."""

    def begin(self, router: Incarnation, now: float) -> BlockEvents:
        """The first part, which ends what the router knew. The rest follows; ``now`` is of
        ``time.monotonic``, here and below."""
        hashes = self._cache.cached_blocks().stored
        self.forget(router)
        if len(hashes) > PART_BLOCKS:
            self._pictures[router] = _Picture(hashes, PART_BLOCKS)
            self._next = min(self._next, now + PAUSE_SECONDS)
        return BlockEvents(stored=hashes[:PART_BLOCKS], cleared=True)

    def forget(self, router: Incarnation) -> None:
        """It is gone. Unknown ones too."""
        self._pictures.pop(router, None)

    def seconds(self, now: float) -> float:
        """Until ``parts`` has more to say; inf while there is nothing."""
        return max(0.0, self._next - now)

    def parts(self, now: float) -> Iterator[tuple[Incarnation, BlockEvents]]:
        """The next part for each router that waits, once it is time."""
        if now < self._next:
            return
        for router, picture in list(self._pictures.items()):
            part = picture.hashes[picture.told : picture.told + PART_BLOCKS]
            picture.told += PART_BLOCKS
            if picture.told >= len(picture.hashes):
                self.forget(router)
            yield router, BlockEvents(stored=self._cache.still_cached(part))
        self._next = now + PAUSE_SECONDS if self._pictures else math.inf
