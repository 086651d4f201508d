"""The header at the start of every slot: key and tokens of the KV after it, and its digest.

Identity travels with the data: D compares every field with the expected one before it touches the
payload. Fixed size, little-endian; the fields have a check sum of their own. The digest is at the
header's end, so that a GPU can write it after computing it. Before it is room for the digest of the
received payload, which D's GPU writes.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

from tandem.protocol.card import HANDOFF_VERSION
from tandem.protocol.errors import WireError
from tandem.protocol.ids import Incarnation, RequestKey

HEADER_BYTES = 256
DIGEST_BYTES = 8
DIGEST_AT = HEADER_BYTES - DIGEST_BYTES
"""Offset of the digest of the payload as P packed it."""
SEEN_AT = DIGEST_AT - DIGEST_BYTES
"""Offset of the digest of the payload in D's slot, if D's device sums it."""
_FIELDS = struct.Struct("<8sI16s16s16sQQQQQ")
_MAGIC = b"TDMSLOT1"
_SUM_BYTES = 16


class Header(NamedTuple):
    """Header of a slot."""

    key: bytes
    """Digest of the request key, 16 bytes."""
    fingerprint: bytes
    """Digest of layout and weights, 16 bytes."""
    producer: Incarnation
    part: int
    """Index of the part within its hand-off."""
    group: int
    """Group of the part's item."""
    start: int
    stop: int
    """Tokens [start, stop)."""
    nbytes: int
    """Header and payload."""
    digest: int
    """Digest of the payload, 64 bits."""

    def differs(self, wanted: Header) -> str | None:
        """Return the name of the first field that differs, except digests."""
        for name in self._fields:
            if name != "digest" and getattr(self, name) != getattr(wanted, name):
                return name
        return None


def key_digest(key: RequestKey) -> bytes:
    """Return the 16 bytes for a key in a header."""
    fields = (key.router, key.request.encode(), str(key.attempt).encode())
    hashed = blake2b(digest_size=16, person=b"tandem-key")
    for field in fields:
        hashed.update(len(field).to_bytes(8, "little") + field)
    return hashed.digest()


def fingerprint_digest(fingerprint: str) -> bytes:
    """Return the 16 bytes for a fingerprint in a header."""
    return blake2b(fingerprint.encode(), digest_size=16, person=b"tandem-slot").digest()


def header_bytes(header: Header) -> bytes:
    """Return the header's bytes, HEADER_BYTES long."""
    fields = _FIELDS.pack(_MAGIC, HANDOFF_VERSION, *header[:-1])
    summed = fields + blake2b(fields, digest_size=_SUM_BYTES).digest()
    return summed.ljust(DIGEST_AT, b"\0") + header.digest.to_bytes(DIGEST_BYTES, "little")


def read_header(data: bytes | memoryview) -> Header:
    """Read from the start of a slot, or WireError for anything that is not a header."""
    size = _FIELDS.size
    if len(data) < HEADER_BYTES:
        raise WireError(f"slot header of {len(data)} bytes")
    fields = bytes(data[:size])
    magic, version, *rest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != HANDOFF_VERSION:
        raise WireError("slot without a header of this version")
    if blake2b(fields, digest_size=_SUM_BYTES).digest() != bytes(data[size : size + _SUM_BYTES]):
        raise WireError("slot header with a wrong check sum")
    return Header._make((*rest, digest_at(data, DIGEST_AT)))


def digest_at(head: bytes | memoryview, at: int) -> int:
    """Return one of the digests of a header: at DIGEST_AT or SEEN_AT."""
    return int.from_bytes(head[at : at + DIGEST_BYTES], "little")


NOBODYS = Header(bytes(16), bytes(16), Incarnation(bytes(16)), 0, 0, 0, 0, HEADER_BYTES, 0)
"""Header of no hand-off, with which packing is tried once at the start."""
