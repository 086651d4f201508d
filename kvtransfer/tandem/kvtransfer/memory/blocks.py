"""KV cache for transports that read and write blocks themselves, with a tag for each block.

A tag names the content: the hash of the tokens so far, or for a partial block the request's key. P
sets it after the last write and clears it before the next; each time the block's turn goes up
first. If D finds the right tag and the same turn after its copy, the block was not released
meanwhile (docs/decisions/commit-by-tags.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

from tandem.kvtransfer.memory.packing import key_digest
from tandem.memory.shared import SharedMemory
from tandem.protocol.ids import BlockHash, RequestKey

TAG_BYTES = 16
TURN_BYTES = 8
CLEARED = bytes(TAG_BYTES)
_TAG = np.dtype((np.void, TAG_BYTES))


def tag_of(key: RequestKey, group: int, index: int, hashes: Sequence[BlockHash]) -> bytes:
    """Return the tag of the block at ``index`` in a group's block table.

    ``hashes`` are the known ones of the request's full blocks.
    """
    if index >= len(hashes):
        own = key_digest(key) + group.to_bytes(2, "little") + index.to_bytes(8, "little")
        return blake2b(own, digest_size=TAG_BYTES, person=b"tandem-tag").digest()
    if group == 0:
        return hashes[index]
    named = group.to_bytes(2, "little") + hashes[index]
    return blake2b(named, digest_size=TAG_BYTES, person=b"tandem-tag").digest()


def tags_from(
    key: RequestKey, group: int, first: int, count: int, hashes: Sequence[BlockHash]
) -> list[bytes]:
    """Return ``tag_of`` for ``count`` blocks from ``first`` on."""
    known = list(hashes[first : first + count]) if group == 0 else []
    beyond = range(first + len(known), first + count)
    return [*known, *(tag_of(key, group, index, hashes) for index in beyond)]


class BlockTags:
    """Tag and turn of each block, in host memory: all tags (zeros are none), then all turns. A
    cached prefix shares its tags until its last request releases them."""

    def __init__(self, num_blocks: int) -> None:
        self._bytes = bytearray(num_blocks * (TAG_BYTES + TURN_BYTES))
        self._turns_at = num_blocks * TAG_BYTES
        self._by_key: dict[RequestKey, list[tuple[int, bytes]]] = {}
        self._holders: dict[int, int] = {}

    def read(self, block: int) -> bytes:
        return bytes(self._bytes[block * TAG_BYTES : (block + 1) * TAG_BYTES])

    def turn(self, block: int) -> bytes:
        """Return how often the tag has changed."""
        at = self._turns_at + block * TURN_BYTES
        return bytes(self._bytes[at : at + TURN_BYTES])

    def set(self, key: RequestKey, block: int, tag: bytes) -> None:
        """Set a block's tag after this key's last write."""
        self._by_key.setdefault(key, []).append((block, tag))
        if self.read(block) == tag:
            self._holders[block] += 1
        else:
            self._write(block, tag)
            self._holders[block] = 1

    def set_many(self, key: RequestKey, blocks: Sequence[int], tags: Sequence[bytes]) -> None:
        """Run ``set`` for many different blocks at once."""
        if not self._holders.keys().isdisjoint(
            blocks
        ):  # a cached prefix that other keys lease, too
            for block, tag in zip(blocks, tags, strict=True):
                self.set(key, block, tag)
            return
        self._by_key.setdefault(key, []).extend(zip(blocks, tags, strict=True))
        self._holders.update(dict.fromkeys(blocks, 1))
        rows, count = np.array(blocks, dtype=np.int64), self._turns_at // TAG_BYTES
        turns = np.frombuffer(self._bytes, np.uint64, count, self._turns_at)
        turns[rows] += np.uint64(1)  # before the tags: see above
        np.frombuffer(self._bytes, _TAG, count)[rows] = np.frombuffer(b"".join(tags), _TAG)

    def clear(self, key: RequestKey) -> None:
        for block, tag in self._by_key.pop(key, ()):
            if self.read(block) != tag:
                continue  # another key's by now
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._write(block, CLEARED)

    def clear_all(self) -> None:
        """Release the blocks of every key. Copies with tags not yet compared become invalid."""
        for key in list(self._by_key):
            self.clear(key)

    def _write(self, block: int, tag: bytes) -> None:
        at = self._turns_at + block * TURN_BYTES
        turn = int.from_bytes(self._bytes[at : at + TURN_BYTES], "little") + 1
        self._bytes[at : at + TURN_BYTES] = turn.to_bytes(TURN_BYTES, "little")
        self._bytes[block * TAG_BYTES : (block + 1) * TAG_BYTES] = tag


class SharedTags(BlockTags):
    """Tags that other processes may map."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._memory = SharedMemory.make(num_blocks * (TAG_BYTES + TURN_BYTES))
        weakref.finalize(self, self._memory.close)
        # Read and written by slices only, which both have.
        self._bytes = self._memory.map()  # type: ignore[assignment]
        self._bytes[:] = bytes(
            self._memory.size
        )  # pages of this process, even if others read them first

    def share(self) -> tuple[int, int]:
        """Return a descriptor of tags and turns, which the caller closes, and their bytes."""
        return self._memory.share(), self._memory.size


@dataclass(frozen=True, slots=True)
class Blocks:
    """KV cache and tags of a worker, for a transport."""

    kv_cache: Tensor
    """uint8 [num_blocks, block_bytes], dense."""
    tags: BlockTags
    """Tags of P's blocks; D's are not read."""
