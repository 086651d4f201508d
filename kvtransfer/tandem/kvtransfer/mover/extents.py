"""Extents for a transport, made from slots as the machines number them."""

from __future__ import annotations

from tandem.kvtransfer.transports.base import Check, Extent, Place, Region


def slot_extent(
    slot: int,
    remote_slot: int,
    nbytes: int,
    *,
    slot_bytes: int,
    remote_slot_bytes: int,
    check: Check = Check.HEADER,
) -> Extent:
    """Return the first ``nbytes`` of P's send slot, for the start of D's receive slot."""
    return Extent(
        Place(Region.SLOTS, slot * slot_bytes),
        Place(Region.SLOTS, remote_slot * remote_slot_bytes),
        nbytes,
        check,
    )
