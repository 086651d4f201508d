"""Checks of a producer's card: possible values, and compatible with this worker. Pure.

Run once a link, before its transport is used: a refusal costs that link alone.
"""

from __future__ import annotations

from tandem.kvtransfer.handoff.actions import Read
from tandem.kvtransfer.handoff.form import (
    Form,
    WireDtype,
    form_of_copies,
    form_of_parts,
    is_ratio,
)
from tandem.kvtransfer.handoff.manifest import why_not_carried
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.kvtransfer.handoff.pull import ConsumerPolicy
from tandem.kvtransfer.mover.mover import MoverParts
from tandem.protocol.layout import Shard

MOST_SLOT_BYTES = 1 << 44
"""Most bytes of all slots of a worker: every transport can write offsets below it."""


def why_refused(card: ProducerCard, parts: MoverParts) -> str | None:
    """Return why this worker cannot link to the peer, or None."""
    layout, offered = parts.layout, parts.transports
    if card.connector not in offered:
        ours = ", ".join(offered)
        return f"the peer chose connector {card.connector!r}; offered is {ours}"
    if not 0 < card.slot_bytes * (card.num_slots + 1) <= MOST_SLOT_BYTES:
        said = f"{card.num_slots} slots of {card.slot_bytes} bytes"
        return f"the peer has {said}; allowed are 1 to {MOST_SLOT_BYTES} bytes in all"
    mine = tuple(str(each.kind) for each in layout.groups)
    if card.groups != mine:
        theirs = ", ".join(card.groups) or "none"
        return f"the peer's groups of KV are {theirs}; here they are {', '.join(mine)}"
    if not is_ratio(card.block_size, layout.block_size):
        return (
            f"block_size is {card.block_size} at the peer and {layout.block_size} here; one has to "
            "divide the other"
        )
    shard = Shard(card.tensor_parallel_rank, card.tensor_parallel_size)
    if shard != parts.shard:
        there, here = (f"rank {each.rank} of {each.size}" for each in (shard, parts.shard))
        return f"the peer's KV is that of {there}; taken over is that of {here}"
    if card.connector in parts.direct and card.wire_dtype is not WireDtype.AUTO:
        return f"kv_wire_dtype is {card.wire_dtype} at the peer, and {card.connector} has no slots"
    return why_not_carried(layout)


def why_not_read(read: Read, card: ProducerCard) -> str | None:
    """Return which slot or block of a read the peer does not have, or None."""
    beyond = max(read.remote_blocks, default=-1)
    if beyond >= card.num_blocks:
        return f"READY names block {beyond} of {card.num_blocks}"
    slot = read.remote_slot
    if slot is not None and (slot >= card.num_slots or read.nbytes > card.slot_bytes):
        return f"PART names slot {slot} of {card.num_slots}"
    return None


def form_with(card: ProducerCard, parts: MoverParts, policy: ConsumerPolicy) -> Form | str | None:
    """Return the form of parts or copies of the peer's KV, or why its transport cannot copy it."""
    own, theirs = policy.block_size, card.block_size
    if card.connector in parts.direct:
        most = parts.transports[card.connector].traits.max_pieces
        return form_of_copies(policy.groups, own, theirs, most)
    asked = {card.wire_dtype, WireDtype(parts.config.kv_wire_dtype)}
    dtype = WireDtype.FP8 if WireDtype.FP8 in asked else WireDtype.AUTO
    return form_of_parts(policy.groups, own, theirs, theirs, dtype)
