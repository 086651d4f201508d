"""Interface of transports, which read extents for the transfer thread.

An extent is written to a receive slot, with header and digest, or to blocks of the KV cache, whose
tags are compared afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import (
    NamedTuple,
    NewType,
    Protocol,
    overload,
    runtime_checkable,
)

import numpy as np
from numpy.typing import NDArray

from tandem.kvtransfer.memory.blocks import Blocks
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.protocol.card import DTYPE_BYTES, KVGroup, Shard
from tandem.protocol.ids import Incarnation

Ticket = NewType("Ticket", int)
"""One read, from ``read`` until ``poll`` returns a terminal state."""


class Region(Enum):
    """Memory of a worker that has an extent."""

    SLOTS = "slots"
    """Send slots of P, receive slots of D."""
    BLOCKS = "blocks"


class Check(Enum):
    """Proof that the bytes of an extent are those that D requested."""

    HEADER = "header"
    """Header and digest at the start of the extent."""
    TAG = "tag"
    """Tag of the extent's block, read after all its bytes."""
    PART = "part"
    """Tag of the block that contains the extent, read after its last part."""
    PATTERN = "pattern"
    """The bytes are known before: the probe of a link."""


class Place(NamedTuple):
    """Start of an extent."""

    region: Region
    offset: int
    """Bytes from the region's start."""


class Extent(NamedTuple):
    """Bytes that are contiguous at both ends."""

    local: Place
    """Place at D, to which it is written."""
    remote: Place
    """Place at P, from which it is read."""
    nbytes: int
    check: Check


class BlockExtents(Sequence[Extent]):
    """P's blocks, each for one of D's, as two lists of numbers instead of hundreds of extents."""

    def __init__(
        self, block_ids: Sequence[int], remote_blocks: Sequence[int], block_bytes: int
    ) -> None:
        assert len(block_ids) == len(remote_blocks), "each block of P is for one of D"
        self.block_ids = block_ids
        self.remote_blocks = remote_blocks
        self.block_bytes = block_bytes

    def __len__(self) -> int:
        return len(self.block_ids)

    @overload
    def __getitem__(self, at: int) -> Extent: ...

    @overload
    def __getitem__(self, at: slice) -> BlockExtents: ...

    def __getitem__(self, at: int | slice) -> Extent | BlockExtents:
        mine, theirs = self.block_ids[at], self.remote_blocks[at]
        if isinstance(mine, Sequence):
            assert isinstance(theirs, Sequence)
            return BlockExtents(mine, theirs, self.block_bytes)
        assert isinstance(theirs, int)
        size = self.block_bytes
        local, remote = Place(Region.BLOCKS, mine * size), Place(Region.BLOCKS, theirs * size)
        return Extent(local, remote, size, Check.TAG)


class Progress(Enum):
    """State of a read."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    """Terminal: no byte of it lands any more."""
    UNKNOWN = "unknown"
    """Not terminal: only quarantine is safe. Returned once a read."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a transport."""

    name: str
    needs_advance: bool
    """Whether P's transfer thread must call ``advance`` for D's reads to progress."""
    moves_gpu_memory: bool = False
    """Whether slots may be in a GPU's memory at both ends."""
    lands_in: Region = Region.SLOTS
    """Region to which KV is written; blocks need no slots and packing."""
    fenced: bool = False
    """Whether the destination's owner runs the copies: every read ends, and no byte is written
    after ``poll`` has returned a terminal state."""
    max_extents: int = 1
    max_pieces: int = 1
    """Maximum extents of one block if the ends' blocks differ in size; 1: such ends use another
    transport."""
    maps_memory: bool = False
    """Whether peers map this worker's memory, KV cache and slots."""
    by_agent: bool = False
    """Whether the node's agent makes the copies; it may restart, or start after the workers."""

    def __post_init__(self) -> None:
        if self.lands_in is Region.BLOCKS and not self.fenced:
            raise ValueError(f"{self.name}: only fenced copies may write blocks that are live")


class Transport(Protocol):
    """Transport, for the transfer thread; nothing here blocks for long."""

    traits: Traits

    def serve(self, memory: SlotMemory, blocks: Blocks | None = None) -> bytes:
        """P: let peers read these slots and, if ``lands_in`` is blocks, these blocks. Return the
        card for it. Raises TransportError."""
        ...

    def receive(self, memory: SlotMemory, blocks: Blocks | None = None) -> None:
        """D: set the slots for reads, and the blocks for copies. Raises TransportError."""
        ...

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """D: prepare reads from this peer. Raises TransportError."""
        ...

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        """D: begin to read at most ``max_extents`` extents of a peer. ``poll`` reports faults, also
        invalid extents; the read is done when all of them are."""
        ...

    def poll(self, ticket: Ticket) -> Progress:
        """Return the state of a read. After a terminal answer the ticket is forgotten."""
        ...

    def tags_of(self, ticket: Ticket) -> bytes:
        """Return the tags of a read's whole blocks, 16 bytes each, in order. Each is read after the
        block's last byte, and cleared if it changed since before the first. Call once, after
        DONE."""
        ...

    def advance(self) -> None:
        """Progress what moves only while this process runs the transport."""
        ...

    def filenos(self) -> list[int]:
        """Return descriptors that become readable when a read progresses; none: nap and poll."""
        ...

    def close(self, peer: Incarnation) -> None:
        """D: end a lost link. Reads that are not terminal can still be polled."""
        ...

    def stop(self) -> None:
        """Release everything. No byte lands after it, except those of copies in ``Timed.moments``,
        which a device has not ended in time."""
        ...


@runtime_checkable
class Sleepable(Protocol):
    """Transport with memory for reads that it can release."""

    @property
    def held_bytes(self) -> int:
        """Return the current bytes of that memory; read by any thread."""
        ...

    def rest(self) -> bool:
        """Release it unless a read is under way, and return whether it is released. The next read
        allocates it again."""
        ...

    def look(self) -> None:
        """Release it if no link needs it any more; called each turn."""
        ...


@runtime_checkable
class Meeting(Protocol):
    """Transport whose peers meet in a folder that may not exist yet."""

    @property
    def unmet(self) -> str | None:
        """P: return why no peer can begin to read now, or None; called by any thread."""
        ...


@runtime_checkable
class Timed(Protocol):
    """Transport that predicts the end of its copies."""

    def moments(self) -> Sequence[float]:
        """Return when copies are likely to end, by ``time.perf_counter``; inf if unknown."""
        ...

    def stirs(self) -> bool:
        """Return whether ``advance`` and ``poll`` would find a finished copy; polled often."""
        ...


def why_unmet(transport: Transport) -> str | None:
    """Return why peers of a transport cannot meet, or None."""
    return transport.unmet if isinstance(transport, Meeting) else None


Numbers = NDArray[np.int64]


class PartExtents(Sequence[Extent]):
    """Runs of one length; those of a block of P's are adjacent in these lists."""

    def __init__(
        self,
        sources: Numbers,
        targets: Numbers,
        nbytes: int,
        remote_blocks: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """``sources`` and ``targets`` are offsets in P's and D's KV cache; ``ends`` are the numbers
        of extents after which each of ``remote_blocks`` is complete."""
        self.sources = sources
        self.targets = targets
        self.nbytes = nbytes
        self.remote_blocks = remote_blocks
        self._ends = frozenset(ends)

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, at: int) -> Extent: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Extent]: ...

    def __getitem__(self, at: int | slice) -> Extent | Sequence[Extent]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        local = Place(Region.BLOCKS, int(self.targets[at]))
        remote = Place(Region.BLOCKS, int(self.sources[at]))
        check = Check.TAG if at % len(self) in self._ends else Check.PART
        return Extent(local, remote, self.nbytes, check)


class End(NamedTuple):
    """A KV cache: the tokens and bytes of its blocks, and the heads in them."""

    block_size: int
    block_bytes: int
    shard: Shard


def part_extents(
    block_ids: Sequence[int],
    remote_blocks: Sequence[int],
    start: int,
    stop: int,
    group: KVGroup,
    mine: End,
    theirs: End,
) -> PartExtents:
    """Return extents of tokens [start, stop) of the common heads, from P's blocks to D's (of
    ``group``). One block size divides the other; ``start`` is a multiple of the smaller."""
    unit = min(mine.block_size, theirs.block_size)
    width = group.head_dim * DTYPE_BYTES[group.dtype]
    own, other = group.shard(mine.shard), group.shard(theirs.shard)
    num_heads = group.num_kv_heads * own.size
    here, there = own.heads(num_heads), other.heads(num_heads)
    heads = np.arange(max(here.start, there.start), min(here.stop, there.stop), dtype=np.int64)
    layers = np.arange(math.prod(group.block_shape[:2]), dtype=np.int64)[:, None]
    at = np.arange(start // unit, -(-stop // unit), dtype=np.int64) * unit

    def places(blocks: Sequence[int], end: End, own: range) -> tuple[Numbers, Numbers]:
        """Return the index of the block of each unit, and offsets [units * runs] in the KV
        cache."""
        size = end.block_size
        runs = (layers * len(own) + heads - own.start).reshape(1, -1) * size
        index = at // size - start // size
        block = np.array(blocks, dtype=np.int64)[index] * end.block_bytes
        return index, (block[:, None] + ((at % size)[:, None] + runs) * width).reshape(-1)

    index, sources = places(remote_blocks, theirs, there)
    _, targets = places(block_ids, mine, here)
    runs = len(sources) // len(at)
    ends = (np.flatnonzero(np.diff(index, append=-1)) + 1) * runs - 1
    return PartExtents(sources, targets, unit * width, remote_blocks, ends.tolist())


def state_extents(
    block_ids: Sequence[int], remote_blocks: Sequence[int], group: KVGroup, mine: End, theirs: End
) -> PartExtents:
    """Return the extent of the state in one block of P's, for one of D's (of ``group``)."""
    ends = range(len(remote_blocks))
    sources = np.array(remote_blocks, dtype=np.int64) * theirs.block_bytes
    targets = np.array(block_ids, dtype=np.int64) * mine.block_bytes
    return PartExtents(sources, targets, group.block_bytes, remote_blocks, ends)
