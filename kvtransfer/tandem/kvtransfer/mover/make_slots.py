"""Choice of the memory for a worker's slots: the KV cache's GPU if every transport can reach it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import shake_128

import torch
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.actions import Read, Unpack
from tandem.kvtransfer.handoff.form import (
    Form,
    WireDtype,
    are_convertible,
    form_of_copies,
    form_of_parts,
    is_ratio,
)
from tandem.kvtransfer.handoff.manifest import num_blocks, why_not_carried
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.kvtransfer.handoff.pull import ConsumerPolicy
from tandem.kvtransfer.memory.blocks import CLEARED, TAG_BYTES, tags_from
from tandem.kvtransfer.memory.packing import Header, key_digest, read_header
from tandem.kvtransfer.memory.slots import (
    Found,
    SharedSlots,
    SlotMemory,
    SlotSizes,
    slot_bytes_for,
    slot_sizes,
)
from tandem.kvtransfer.mover.mover import MoverParts
from tandem.kvtransfer.transports.base import Region, Traits, Transport
from tandem.memory.device import DeviceFullError, DeviceMemoryError
from tandem.protocol.card import KVLayout, Shard
from tandem.protocol.errors import FailCause, WireError
from tandem.protocol.ids import BlockHash, Incarnation

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
    """Return what is wrong with copied blocks, or None. ``seen`` are 16-byte tags of P's blocks (of
    ``block_size`` tokens), read after the copy.

    A cleared tag means that the lease has ended, which is not the link's fault.
    """
    first = item.start // block_size
    count = num_blocks(item.start, item.stop, block_size)
    if len(seen) != count * TAG_BYTES:
        return FailCause.IDENTITY, f"{len(seen)} bytes of tags for {count} blocks"
    wanted = tags_from(item.key, item.group, first, count, hashes)
    if seen == b"".join(wanted):  # hundreds at once, as an engine's next step waits
        return None
    for at, own in enumerate(wanted):
        tag, index = seen[at * TAG_BYTES : (at + 1) * TAG_BYTES], first + at
        if tag == CLEARED:
            return FailCause.GONE, f"block {index} was let go while it was copied"
        if tag != own:
            return FailCause.IDENTITY, f"block {index} has the tag of another"
    return None


_PIECE = 4096


def pattern(incarnation: Incarnation, nbytes: int) -> bytes:
    """Return ``nbytes`` of P's pattern; pieces differ, so that swapped pages are seen."""
    pieces = []
    for n in range(-(-nbytes // _PIECE)):
        seed = incarnation + n.to_bytes(8, "little")
        pieces.append(shake_128(seed).digest(64) * (_PIECE // 64))
    return b"".join(pieces)[:nbytes]


MOST_SLOT_BYTES = 1 << 44
"""Upper bound of the bytes of a worker's slots, within every transport's offsets."""


def why_refused(card: ProducerCard, parts: MoverParts) -> str | None:
    """Return why this worker cannot link to the peer, or None."""
    layout, offered = parts.layout, parts.transports
    if card.connector not in offered:
        ours = ", ".join(offered)
        return f"the peer chose connector {card.connector!r}; offered is {ours}"
    if not 0 < card.slot_bytes * (card.num_slots + 1) <= MOST_SLOT_BYTES:
        text = f"{card.num_slots} slots of {card.slot_bytes} bytes"
        return f"the peer has {text}; allowed are 1 to {MOST_SLOT_BYTES} bytes in all"
    mine = tuple(str(each.kind) for each in layout.groups)
    if card.groups != mine:
        theirs = ", ".join(card.groups) or "none"
        return f"the peer's groups of KV are {theirs}; here they are {', '.join(mine)}"
    if not are_convertible(card.dtypes, held := dtypes_of(layout)):
        theirs = ", ".join(card.dtypes) or "none"
        return f"the peer holds KV as {theirs}; here it is {', '.join(held)}"
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


def dtypes_of(layout: KVLayout) -> tuple[str, ...]:
    """Return the types of the groups."""
    return tuple(each.dtype for each in layout.groups)


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
    unlike = card.dtypes != dtypes_of(parts.layout)
    if card.connector in parts.direct:
        if unlike:
            held = ", ".join(dtypes_of(parts.layout))
            return f"KV is held as {', '.join(card.dtypes)} there and {held} here"
        most = parts.transports[card.connector].traits.max_pieces
        return form_of_copies(policy.groups, own, theirs, most)
    asked = {card.wire_dtype, WireDtype(parts.config.kv_wire_dtype)}
    dtype = WireDtype.FP8 if WireDtype.FP8 in asked else WireDtype.AUTO
    if unlike:
        dtype = WireDtype.CODES
    return form_of_parts(policy.groups, own, theirs, dtype)


logger = logging.getLogger(__name__)


def sized_slots(
    config: KVTransferConfig,
    count: int,
    kv_cache: Tensor,
    traits: Iterable[Traits],
    *,
    spare: int = 0,
) -> tuple[SlotMemory, SlotSizes]:
    """Return ``count`` slots and ``spare`` more for the blocks of ``kv_cache`` (uint8 [blocks,
    block_bytes]), sized by settings and device. Raises TransportError if there is no room."""
    near = lies_near(kv_cache, traits := tuple(traits))
    total = torch.cuda.get_device_properties(kv_cache.device).total_memory if near else None
    staged = kv_cache.is_cuda and not near
    sizes = slot_sizes(config, kv_cache.shape[1], count=count, gpu_bytes=total, staged=staged)
    try:
        return make_slots(count + spare, sizes.slot_bytes, kv_cache, traits), sizes
    except (torch.OutOfMemoryError, DeviceFullError) as error:
        mib = (count + spare) * sizes.slot_bytes >> 20
        text = f"no room for {count + spare} slots, {mib} MiB of GPU memory"
        lower = "lower --kv-slots or --gpu-memory-utilization"
        raise TransportError(f"{text}: {lower}") from error


@dataclass(frozen=True, slots=True)
class Slots:
    """A worker's slots: for parts, and for patterns only."""

    memory: SlotMemory
    """Slots of transports that move parts through slots; also of patterns, if there are none."""
    patterns: SlotMemory
    """Small slots for patterns, of transports that copy blocks."""
    sizes: SlotSizes

    def of(self, traits: Traits) -> SlotMemory:
        return self.patterns if traits.lands_in is Region.BLOCKS else self.memory


def slots_for(
    config: KVTransferConfig,
    count: int,
    kv_cache: Tensor,
    transports: dict[str, Transport],
    *,
    spare: int = 0,
) -> Slots:
    """Return ``make_all_slots`` for these transports by name. Those that cannot map the device's
    memory are removed and logged. Raises TransportError if none is left, or no room."""
    try:
        return make_all_slots(config, count, kv_cache, _traits(transports), spare=spare)
    except DeviceFullError as error:
        text = f"no room for patterns of KV ({error}): lower --gpu-memory-utilization"
        raise TransportError(text) from error
    except DeviceMemoryError as error:
        mapping = [name for name, each in transports.items() if each.traits.maps_memory]
        if len(mapping) == len(transports):
            raise TransportError(f"KV cannot go by {', '.join(mapping)}: {error}") from error
        for name in mapping:
            logger.warning("KV does not go by %s: %s", name, error)
            transports.pop(name).stop()
    return make_all_slots(config, count, kv_cache, _traits(transports), spare=spare)


def _traits(transports: dict[str, Transport]) -> list[Traits]:
    return [each.traits for each in transports.values()]


def make_all_slots(
    config: KVTransferConfig,
    count: int,
    kv_cache: Tensor,
    traits: Iterable[Traits],
    *,
    spare: int = 0,
) -> Slots:
    """Return ``count`` slots and ``spare`` more for the blocks of ``kv_cache`` (uint8 [blocks,
    block_bytes]), as these transports need. Raises TransportError if there is no room."""
    through = [each for each in traits if each.lands_in is Region.SLOTS]
    direct = [each for each in traits if each.lands_in is Region.BLOCKS]
    patterns = None
    if direct:
        size = slot_bytes_for(config.kv_probe_bytes, 0)
        patterns = make_slots(count + spare, size, kv_cache, direct)
    if through or patterns is None:
        memory, sizes = sized_slots(config, count, kv_cache, through, spare=spare)
    else:
        memory, sizes = patterns, SlotSizes(patterns.slot_bytes, 1)
    return Slots(memory, memory if patterns is None else patterns, sizes)


def lies_near(kv_cache: Tensor, traits: Iterable[Traits]) -> bool:
    """Return whether slots for this KV cache are in GPU memory, next to it."""
    return kv_cache.is_cuda and all(each.moves_gpu_memory for each in traits)


def make_slots(
    count: int, slot_bytes: int, kv_cache: Tensor, traits: Sequence[Traits]
) -> SlotMemory:
    """Return slots for the blocks of ``kv_cache`` that all these transports can move."""
    shared = any(each.maps_memory for each in traits)
    if kv_cache.is_cuda:
        from tandem.kvtransfer.memory import device_slots

        if shared:
            return device_slots.MappedSlots(count, slot_bytes, kv_cache)
        if lies_near(kv_cache, traits):
            return device_slots.DeviceSlots(count, slot_bytes, kv_cache)
        return device_slots.HostSlotsOfDevice(count, slot_bytes, kv_cache)
    return SharedSlots(count, slot_bytes) if shared else SlotMemory(count, slot_bytes)
