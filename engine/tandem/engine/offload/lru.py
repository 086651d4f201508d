"""Blocks of an offload tier by hash, the least recently used first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from tandem.protocol.ids import BlockHash


class LRUBlocks:
    """LRU of host blocks, numbered from 0. Pinned ones are never evicted.

    A pinned block that becomes the oldest is set aside until it is unpinned, so that it is passed
    once only.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a tier without blocks"
        self.num_blocks = num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._line: OrderedDict[BlockHash, None] = OrderedDict()
        """Hashes, the next one to evict first, without those in ``_aside``."""
        self._aside: dict[int, BlockHash] = {}
        """Pinned blocks that became the oldest."""
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        self._orphans: set[int] = set()
        """Pinned blocks whose hash is forgotten; free once unpinned."""

    def __len__(self) -> int:
        return len(self._block_of)

    def hashes(self) -> tuple[BlockHash, ...]:
        return tuple(self._block_of)

    def find(self, digest: BlockHash) -> int | None:
        return self._block_of.get(digest)

    def touch(self, digest: BlockHash) -> None:
        self._aside.pop(self._block_of[digest], None)
        self._line[digest] = None
        self._line.move_to_end(digest)

    def put(self, digest: BlockHash) -> tuple[int, BlockHash | None] | None:
        """Return a block for a new hash, and the evicted hash; None if all blocks are pinned."""
        assert digest not in self._block_of, "a hash has a host block already"
        lost = None
        if len(self._block_of) + len(self._orphans) >= self.num_blocks:
            lost = self._oldest()
            if lost is None:
                return None
            self._give_back(self._block_of.pop(lost))
        block = self._take()
        self._block_of[digest] = block
        self._line[digest] = None
        return block, lost

    def forget(self, digest: BlockHash) -> bool:
        block = self._block_of.pop(digest, None)
        if block is None:
            return False
        self._line.pop(digest, None)
        self._aside.pop(block, None)
        if block in self._pins:
            self._orphans.add(block)
        else:
            self._give_back(block)
        return True

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep each block's content until as many ``unpin``."""
        self._pins.update(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        back: list[BlockHash] = []
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                if block in self._orphans:
                    self._orphans.remove(block)
                    self._give_back(block)
                elif block in self._aside:
                    back.append(self._aside.pop(block))
        for digest in reversed(back):
            self._line[digest] = None
            self._line.move_to_end(digest, last=False)

    def _take(self) -> int:
        """Return the number of a block without content."""
        return self._empty.pop()

    def _give_back(self, block: int) -> None:
        """Take back a block whose content is no longer needed."""
        self._empty.append(block)

    def _oldest(self) -> BlockHash | None:
        while self._line:
            digest, _ = self._line.popitem(last=False)
            block = self._block_of[digest]
            if block not in self._pins:
                return digest
            self._aside[block] = digest
        return None
