"""Checks that received data is what D asked for: header and digest of a slot, tags of a copy."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.kvtransfer.handoff.actions import Unpack
from tandem.kvtransfer.handoff.manifest import num_blocks
from tandem.kvtransfer.memory.blocks import CLEARED, TAG_BYTES, tags_from
from tandem.kvtransfer.memory.header import Header, key_digest, read_header
from tandem.kvtransfer.memory.slots import Found
from tandem.protocol.errors import FailCause, WireError
from tandem.protocol.ids import BlockHash

Fault = tuple[FailCause, str]


def fault_of_slot(found: Found, item: Unpack, fingerprint: bytes) -> Fault | None:
    """Return what is wrong with a slot's content, or None."""
    try:
        header = read_header(found.header)
    except WireError as error:
        return FailCause.IDENTITY, str(error)
    wanted = Header(
        key=key_digest(item.key),
        fingerprint=fingerprint,
        producer=item.peer,
        part=item.index,
        group=item.group,
        start=item.start,
        stop=item.stop,
        nbytes=item.nbytes,
        digest=header.digest,
    )
    differs = header.differs(wanted)
    if differs is not None:
        return FailCause.IDENTITY, f"the slot's header has another {differs}"
    if found.digest != header.digest:
        return FailCause.DIGEST, "the slot's bytes do not have its digest"
    return None


def fault_of_copy(
    item: Unpack, seen: bytes, hashes: Sequence[BlockHash], block_size: int
) -> Fault | None:
    """Return what is wrong with copied blocks, or None. ``seen`` are their tags, 16 bytes each,
    read after the copy, of P's blocks, which have ``block_size`` tokens.

    A cleared tag means that the lease has ended meanwhile and GONE follows. It does not count
    against the link.
    """
    first = item.start // block_size
    count = num_blocks(item.start, item.stop, block_size)
    if len(seen) != count * TAG_BYTES:
        return FailCause.IDENTITY, f"{len(seen)} bytes of tags for {count} blocks"
    wanted = tags_from(item.key, item.group, first, count, hashes)
    if seen == b"".join(wanted):  # hundreds at once: an engine's next step waits for it
        return None
    for at, own in enumerate(wanted):
        tag, index = seen[at * TAG_BYTES : (at + 1) * TAG_BYTES], first + at
        if tag == CLEARED:
            return FailCause.GONE, f"block {index} was let go while it was copied"
        if tag != own:
            return FailCause.IDENTITY, f"block {index} has the tag of another"
    return None
