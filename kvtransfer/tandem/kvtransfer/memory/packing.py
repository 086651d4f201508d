"""Packings of KV cache blocks into the payload of a slot, and back: whole, in parts, or as fp8.

A group's KV is at the start of a block, which may be larger. If block sizes differ, the larger end
gathers or scatters parts of its blocks, each a block of the smaller end. ``part_ids`` numbers them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.blocks import (
    pack,
    pack_parts,
    unpack,
    unpack_parts,
)
from tandem.kernels.narrow import decode, encode, narrow, widen
from tandem.kvtransfer.handoff.form import Form, WireDtype
from tandem.protocol.card import FP8_CODES, HANDOFF_VERSION, KVGroup, KVKind
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
    """Return the 16 bytes of a key in a header."""
    fields = (key.router, key.request.encode(), str(key.attempt).encode())
    hashed = blake2b(digest_size=16, person=b"tandem-key")
    for field in fields:
        hashed.update(len(field).to_bytes(8, "little") + field)
    return hashed.digest()


def fingerprint_digest(fingerprint: str) -> bytes:
    """Return the 16 bytes of a fingerprint in a header."""
    return blake2b(fingerprint.encode(), digest_size=16, person=b"tandem-slot").digest()


def header_bytes(header: Header) -> bytes:
    """Return the header's bytes, HEADER_BYTES long."""
    fields = _FIELDS.pack(_MAGIC, HANDOFF_VERSION, *header[:-1])
    summed = fields + blake2b(fields, digest_size=_SUM_BYTES).digest()
    return summed.ljust(DIGEST_AT, b"\0") + header.digest.to_bytes(DIGEST_BYTES, "little")


def read_header(data: bytes | memoryview) -> Header:
    """Read the header at the start of a slot. Raises WireError if it is not a valid header."""
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
"""Header of no hand-off, for the first packing."""


class Packing:
    """Packing of whole blocks, unchanged."""

    one_by_one = False
    """Whether blocks are copied one by one, by numbers on the host."""

    def block_bytes(self, kv_cache: Tensor) -> int:
        """Return the bytes of a block in the payload."""
        return kv_cache.shape[1]

    def pack(self, kv_cache: Tensor, ids: Tensor, payload: Tensor) -> None:
        """Gather blocks of ``kv_cache`` (uint8 [num_blocks, block_bytes]) into uint8 [len(ids),
        block_bytes] on the same device."""
        pack(kv_cache, ids, payload)

    def unpack(self, payload: Tensor, ids: Tensor, kv_cache: Tensor) -> None:
        """Scatter a payload into blocks of ``kv_cache``."""
        unpack(payload, ids, kv_cache)


WHOLE = Packing()


@dataclass(frozen=True, slots=True)
class SlicePacking(Packing):
    """Packing of the first ``nbytes`` bytes of blocks, unchanged."""

    nbytes: int
    one_by_one = True

    def block_bytes(self, kv_cache: Tensor) -> int:
        return self.nbytes

    def pack(self, kv_cache: Tensor, ids: Tensor, payload: Tensor) -> None:
        for row, block in zip(payload, ids.tolist(), strict=True):
            row.copy_(kv_cache[block, : self.nbytes])

    def unpack(self, payload: Tensor, ids: Tensor, kv_cache: Tensor) -> None:
        for row, block in zip(payload, ids.tolist(), strict=True):
            kv_cache[block, : self.nbytes].copy_(row)


@dataclass(frozen=True, slots=True)
class PartPacking(Packing):
    """Packing of equal parts of the first ``nbytes`` bytes of blocks, unchanged."""

    nbytes: int
    parts: int
    rows: int
    """Contiguous runs of tokens in these bytes."""
    one_by_one = True

    def block_bytes(self, kv_cache: Tensor) -> int:
        return self.nbytes // self.parts

    def pack(self, kv_cache: Tensor, ids: Tensor, payload: Tensor) -> None:
        for blocks, parts, some in self._dense(kv_cache, ids, payload):
            pack_parts(blocks, parts, some, self.rows)

    def unpack(self, payload: Tensor, ids: Tensor, kv_cache: Tensor) -> None:
        for blocks, parts, some in self._dense(kv_cache, ids, payload):
            unpack_parts(some, parts, blocks, self.rows)

    def _dense(
        self, kv_cache: Tensor, ids: Tensor, payload: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield dense blocks, [n, nbytes], numbers of parts in them, and the parts' places in the
        payload: all at once, or one by one if blocks are larger."""
        if kv_cache.shape[1] == self.nbytes:
            yield kv_cache, ids, payload
            return
        for one, at in zip(payload, ids.tolist(), strict=True):
            block, part = divmod(at, self.parts)
            yield kv_cache[block : block + 1, : self.nbytes], torch.tensor([part]), one[None]


@dataclass(frozen=True, slots=True)
class NarrowPacking(Packing):
    """Packing of blocks or parts as float8; one at a time, to keep temporaries small."""

    inner: Packing
    """Packing of the numbers in the KV cache's type."""
    rows: int
    dtype: torch.dtype
    scales: Tensor | None = None
    """The model's scales of codes, float32 [rows]; None adds a scale of each run in each block."""

    @property
    def one_by_one(self) -> bool:  # type: ignore[override]
        return self.inner.one_by_one

    def block_bytes(self, kv_cache: Tensor) -> int:
        added = 4 * self.rows if self.scales is None else 0
        return self.inner.block_bytes(kv_cache) // self.dtype.itemsize + added

    def pack(self, kv_cache: Tensor, ids: Tensor, payload: Tensor) -> None:
        held = self._held(kv_cache)
        for at in range(len(ids)):
            self.inner.pack(kv_cache, ids[at : at + 1], held)
            if self.scales is None:
                narrow(self._numbers(held), payload[at : at + 1])
            else:
                encode(self._numbers(held), self.scales, payload[at : at + 1])

    def unpack(self, payload: Tensor, ids: Tensor, kv_cache: Tensor) -> None:
        held = self._held(kv_cache)
        for at in range(len(ids)):
            packed = payload[at : at + 1].to(kv_cache.device)
            if self.scales is None:
                widen(packed, self._numbers(held))
            else:
                decode(packed, self.scales, self._numbers(held))
            self.inner.unpack(held, ids[at : at + 1], kv_cache)

    def _held(self, kv_cache: Tensor) -> Tensor:
        size = self.inner.block_bytes(kv_cache)
        return torch.empty((1, size), dtype=torch.uint8, device=kv_cache.device)

    def _numbers(self, held: Tensor) -> Tensor:
        return held.view(self.dtype).view(1, self.rows, -1)


def packing_of(form: Form | None, group: KVGroup, block_bytes: int, scales: Tensor) -> Packing:
    """Return the packing of parts of this form for a worker with this group in blocks of
    ``block_bytes``. ``scales`` are those of codes, float32 [rows of the group]."""
    count = _parts_of(form, group)
    inner = WHOLE if group.block_bytes == block_bytes else SlicePacking(group.block_bytes)
    if count > 1:
        inner = PartPacking(group.block_bytes, count, group.num_rows)
    if form is None or form.dtype is WireDtype.AUTO or group.kind is KVKind.STATE:
        return inner
    if form.dtype is WireDtype.FP8:
        return NarrowPacking(inner, group.num_rows, getattr(torch, group.dtype))
    if group.dtype == FP8_CODES:
        return inner
    return NarrowPacking(inner, group.num_rows, getattr(torch, group.dtype), scales)


def _parts_of(form: Form | None, group: KVGroup) -> int:
    if form is None or group.kind is KVKind.STATE:
        return 1
    return group.block_size // form.block_size


def part_ids(
    block_ids: Sequence[int], start: int, stop: int, group: KVGroup, form: Form | None
) -> Sequence[int]:
    """Return the numbers that a packing takes, for tokens [start, stop) of a group in these
    blocks."""
    count = _parts_of(form, group)
    if form is None or count == 1:
        return block_ids
    size, first = form.block_size, start // group.block_size
    return [
        block_ids[at // count - first] * count + at % count
        for at in range(start // size, -(-stop // size))
    ]
