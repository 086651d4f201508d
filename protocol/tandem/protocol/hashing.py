"""Chained hashes of token blocks: equal hash, equal KV.

blake2b-128 over the parent's hash and the block's ids; cryptographic, so that tenants cannot make
collisions. The root covers fingerprint, adapter, salt and block size. Partial blocks have no hash.
Embeddings are hashed as another kind of block.
"""

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.ids import BlockHash

DIGEST_BYTES = 16
_ID_BYTES = 4


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
    embeds: PromptEmbeds | None = None,
) -> None:
    """Append the hashes of all full blocks of ``token_ids`` that ``hashes`` lacks.

    Each id is under 2**32. ``embeds`` replace the first positions, whose ids are ignored.
    """
    first, end = len(hashes), len(token_ids) // block_size
    if first >= end:
        return
    parent = hashes[-1] if hashes else root
    if embeds is not None:
        with_embeds = min(end, -(-embeds.num_tokens // block_size))
        for index in range(first, with_embeds):
            ids = token_ids[index * block_size : (index + 1) * block_size]
            parent = _after_embeds(parent, embeds, index * block_size, ids)
            hashes.append(parent)
        first = max(first, with_embeds)
    data = _as_bytes(token_ids[first * block_size : end * block_size])
    size = _ID_BYTES * block_size
    for start in range(0, len(data), size):
        parent = _after(parent, data[start : start + size])
        hashes.append(parent)


def hash_blocks(
    root: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    embeds: PromptEmbeds | None = None,
) -> list[BlockHash]:
    """Return the hashes of the full blocks, in order. ``embeds`` as in ``extend_hashes``."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, token_ids, block_size, embeds)
    return hashes


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _after(parent: BlockHash, data: bytes) -> BlockHash:
    return BlockHash(blake2b(parent + data, digest_size=DIGEST_BYTES).digest())


def _after_embeds(
    parent: BlockHash, embeds: PromptEmbeds, start: int, token_ids: Sequence[int]
) -> BlockHash:
    """Return the hash of a block: dtype, hidden size, number of vectors, vectors, ids after
    them.
    """
    held = min(len(token_ids), embeds.num_tokens - start)
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"tandem-embeds")
    digest.update(parent)
    digest.update(msgspec.msgpack.encode((embeds.dtype, embeds.hidden_size, held)))
    digest.update(embeds.rows(start, start + held))
    digest.update(_as_bytes(token_ids[held:]))
    return BlockHash(digest.digest())
