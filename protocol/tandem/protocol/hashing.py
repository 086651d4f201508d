"""Chained hashes of token blocks: equal hash, equal KV.

blake2b-128 over the parent's hash and the block's ids; the root covers everything else that
changes KV (fingerprint, adapter, salt, block size). A fast non-cryptographic hash would let one
tenant collide with another's prefix on purpose. The router hashes a prompt once and sends the
hashes; workers extend the chain with what they generate. Partial blocks have no hash.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from tandem.protocol.ids import BlockHash

DIGEST_BYTES = 16
_ID_BYTES = 4


def root_hash(
    *,
    fingerprint: str,
    block_size: int,
    adapter: str | None = None,
    salt: str | None = None,
) -> BlockHash:
    """The parent of a prompt's first block.

    ``fingerprint`` names weights, dtype and layout; ``salt`` keeps tenants' caches apart.
    """
    fields = msgspec.msgpack.encode((fingerprint, block_size, adapter, salt))
    return BlockHash(blake2b(fields, digest_size=DIGEST_BYTES, person=b"tandem-root").digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of one full block of ids (each under 2**32) after ``parent``."""
    return _after(parent, _as_bytes(token_ids))


def extend_hashes(
    hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int
) -> None:
    """Append the hashes of all full blocks of ``token_ids`` that ``hashes`` lacks, in place."""
    first, end = len(hashes), len(token_ids) // block_size
    if first >= end:
        return
    data = _as_bytes(token_ids[first * block_size : end * block_size])
    size = _ID_BYTES * block_size
    parent = hashes[-1] if hashes else root
    for start in range(0, len(data), size):
        parent = _after(parent, data[start : start + size])
        hashes.append(parent)


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of ``token_ids``, first to last."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, token_ids, block_size)
    return hashes


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _after(parent: BlockHash, data: bytes) -> BlockHash:
    return BlockHash(blake2b(parent + data, digest_size=DIGEST_BYTES).digest())
