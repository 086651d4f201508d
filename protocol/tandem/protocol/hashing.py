"""Chained hashes of token blocks: equal hash, equal KV.

blake2b-128 over the parent's hash and the block's ids; cryptographic, so that tenants cannot make
collisions. The root covers fingerprint, adapter, salt and block size. Partial blocks have no hash.
Blocks with other content than ids, such as embeddings, have hashes of their own kind.
"""

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import msgspec

from tandem.protocol.ids import BlockHash

DIGEST_BYTES = 16
_ID_BYTES = 4


class PromptContent(Protocol):
    """Content of a prompt's first positions in addition to, or instead of, their ids."""

    @property
    def num_tokens(self) -> int:
        """Return the number of these positions."""
        ...

    @property
    def nbytes(self) -> int: ...

    def hash_block(self, parent: BlockHash, start: int, token_ids: Sequence[int]) -> BlockHash:
        """Return the hash of the block at position ``start`` with these ids."""
        ...


@lru_cache(maxsize=64)
def root_hash(
    *,
    fingerprint: str,
    block_size: int,
    adapter: str | None = None,
    salt: str | None = None,
) -> BlockHash:
    """Return the parent hash of a prompt's first block; ``salt`` separates caches."""
    fields = msgspec.msgpack.encode((fingerprint, block_size, adapter, salt))
    return BlockHash(blake2b(fields, digest_size=DIGEST_BYTES, person=b"tandem-root").digest())


def extend_hashes(
    hashes: list[BlockHash],
    root: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    content: PromptContent | None = None,
) -> None:
    """Append the hashes of all full blocks of ``token_ids`` that ``hashes`` lacks.

    Each id is under 2**32. Blocks that begin within ``content`` have its hashes.
    """
    first, end = len(hashes), len(token_ids) // block_size
    if first >= end:
        return
    parent = hashes[-1] if hashes else root
    if content is not None:
        with_content = min(end, -(-content.num_tokens // block_size))
        for index in range(first, with_content):
            ids = token_ids[index * block_size : (index + 1) * block_size]
            parent = content.hash_block(parent, index * block_size, ids)
            hashes.append(parent)
        first = max(first, with_content)
    data = id_bytes(token_ids[first * block_size : end * block_size])
    size = _ID_BYTES * block_size
    for start in range(0, len(data), size):
        parent = hash_bytes(parent, data[start : start + size])
        hashes.append(parent)


def hash_blocks(
    root: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    content: PromptContent | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks, in order. ``content`` as in ``extend_hashes``."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, token_ids, block_size, content)
    return hashes


def id_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the ids as hashes cover them."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def hash_bytes(parent: BlockHash, data: bytes) -> BlockHash:
    """Return the hash of a block of ids only, given as ``id_bytes``."""
    return BlockHash(blake2b(parent + data, digest_size=DIGEST_BYTES).digest())
