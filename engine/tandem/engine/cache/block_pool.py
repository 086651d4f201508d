"""Pool of KV blocks: reference counts, the free list, and the hash of each block.

A freed block stays cached under its hash until it is evicted. Blocks without a hash are reused
first, then cached ones, the least recently released first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from tandem.protocol.errors import TandemError
from tandem.protocol.ids import BlockHash
from tandem.protocol.outputs import BlockEvents


class IntegrityError(TandemError):
    """Blocks were lost, shared by accident or freed twice; the engine must stop."""


_HASH_BYTES = 16


def is_hash(key: BlockHash) -> bool:
    """Return whether a key is a block's hash alone, which are those of the first group."""
    return len(key) == _HASH_BYTES


class BlockEventLog:
    """Net changes of the prefix cache since the last ``drain``, for the routers' index: those of
    the first group."""

    def __init__(self) -> None:
        self._last: dict[BlockHash, bool] = {}
        """Whether each changed hash is cached now."""
        self._cleared = False

    def stored(self, digest: BlockHash) -> None:
        if is_hash(digest):
            self._last[digest] = True

    def removed(self, digest: BlockHash) -> None:
        if is_hash(digest):
            self._last[digest] = False

    def cleared(self) -> None:
        self._last.clear()
        self._cleared = True

    def drain(self) -> BlockEvents | None:
        if not self._last and not self._cleared:
            return None
        events = BlockEvents(
            stored=tuple(digest for digest, cached in self._last.items() if cached),
            removed=tuple(digest for digest, cached in self._last.items() if not cached),
            cleared=self._cleared,
        )
        self._last.clear()
        self._cleared = False
        return events


class BlockPool:
    """Blocks numbered from 0, each free or held by at least one sequence."""

    def __init__(self, num_blocks: int, log: BlockEventLog) -> None:
        assert num_blocks > 0, "a pool without blocks"
        self.num_blocks = num_blocks
        self._log = log
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        """Free blocks without a hash; the next one to use is last."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Free cached blocks; the next one to evict is first."""
        self.on_evict: Callable[[int, BlockHash], None] | None = None
        """Called with a cached block before it is allocated and overwritten."""

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    def cached(self) -> tuple[BlockHash, ...]:
        return tuple(self._block_of)

    def find(self, digest: BlockHash) -> int | None:
        """Return the block cached under ``digest``. It may be evicted unless held."""
        return self._block_of.get(digest)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` blocks for one new holder, evicting cached ones if needed."""
        assert count <= self.num_free, f"{count} blocks are required, {self.num_free} are free"
        empty, references = self._empty, self._references
        taken = []
        for _ in range(count):
            block = empty.pop() if empty else self._evict()
            references[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder of each; the first block that becomes free is evicted first."""
        references, hash_of = self._references, self._hash_of
        for block in blocks:
            count = references[block] - 1
            if count < 0:
                raise IntegrityError(f"block {block} was freed twice")
            references[block] = count
            if count == 0:
                if hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None

    def cache(self, block: int, digest: BlockHash) -> None:
        """Cache a held block, unless a block of equal content is cached."""
        assert self._references[block] > 0, f"block {block} is cached while free"
        if self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block
            self._log.stored(digest)

    def forget_free(self) -> int:
        """Drop every cached block that is not held; return their number."""
        count = len(self._evictable)
        if count == len(self._block_of):
            self._block_of.clear()
            self._log.cleared()
        for block in self._evictable:
            digest = self._hash_of[block]
            assert digest is not None, f"block {block} is evictable without a hash"
            if self._block_of.pop(digest, None) is not None:
                self._log.removed(digest)
            self._hash_of[block] = None
            self._empty.append(block)
        self._evictable.clear()
        return count

    def check(self, holders: Mapping[int, int]) -> None:
        """Raise IntegrityError unless the counts of holders are ``holders`` (0 if absent) and agree
        with free list and hashes."""
        free = set(self._empty) | set(self._evictable)
        if len(free) != self.num_free:
            raise IntegrityError("a block is in the free list twice")
        for block, count in enumerate(self._references):
            expected = holders.get(block, 0)
            if count != expected:
                raise IntegrityError(f"block {block}: {count} references, {expected} holders")
            if (count == 0) != (block in free):
                raise IntegrityError(f"block {block} with {count} references is in the wrong list")
            if count == 0 and (self._hash_of[block] is not None) != (block in self._evictable):
                raise IntegrityError(f"free block {block} is in the wrong free list")
        for digest, block in self._block_of.items():
            if self._hash_of[block] != digest:
                raise IntegrityError(f"block {block} is cached under a hash that it does not have")
        if len(self._block_of) != sum(digest is not None for digest in self._hash_of):
            raise IntegrityError("a block has a hash under which it cannot be found")

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        digest = self._hash_of[block]
        assert digest is not None, f"block {block} is evictable without a hash"
        del self._block_of[digest]
        self._hash_of[block] = None
        self._log.removed(digest)
        if self.on_evict is not None:
            self.on_evict(block, digest)
        return block
