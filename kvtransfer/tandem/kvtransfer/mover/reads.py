"""D's reads under way: begun, polled, and how long to nap between polls."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.kvtransfer.handoff.actions import Read, Unpack
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.kvtransfer.memory.packing import fingerprint_digest
from tandem.kvtransfer.memory.slots import Inspection, Move, SlotMemory
from tandem.kvtransfer.mover.make_slots import Fault, fault_of_slot
from tandem.kvtransfer.mover.mover import MoverParts
from tandem.kvtransfer.transports.base import (
    BlockExtents,
    Check,
    End,
    Extent,
    Place,
    Progress,
    Region,
    Ticket,
    Timed,
    Transport,
    part_extents,
    state_extents,
)
from tandem.kvtransfer.waiting import is_foretold, nap_before, watch
from tandem.protocol.card import KVKind, KVLayout, Shard
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation, RequestKey


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


logger = logging.getLogger(__name__)


class Emptied(NamedTuple):
    """A part that is out of its slot, or will never be."""

    item: Unpack
    started: float
    """Start by ``time.perf_counter``."""
    fault: Fault | None


class Unpacks:
    """Parts that are unpacked, for the transfer thread."""

    def __init__(self, parts: MoverParts, memory: SlotMemory) -> None:
        self._parts = parts
        self._memory = memory
        self._waiting: deque[Unpack] = deque()
        self._inspected: deque[tuple[Unpack, float, Inspection]] = deque()
        """Inspected parts in the order in which they end, like the moved ones."""
        self._moved: deque[tuple[Unpack, float, Move, Fault | None]] = deque()
        self._fingerprint = fingerprint_digest(parts.fingerprint.compatibility)

    def add(self, item: Unpack) -> None:
        self._waiting.append(item)

    @property
    def waits(self) -> bool:
        """Return whether ``begin`` has something to do."""
        return bool(self._waiting)

    @property
    def under_way(self) -> bool:
        """Return whether ``ended`` is to be called again."""
        return bool(self._inspected or self._moved)

    def written(self) -> frozenset[RequestKey]:
        """Return the keys whose blocks are being written, as far as ``ended`` has found."""
        return frozenset(item.key for item, *_ in self._moved)

    def begin(self) -> None:
        """Begin the oldest queued part; one at a time, so that messages need not wait."""
        item = self._waiting.popleft()
        assert item.slot is not None, "copies are judged by their tags"
        started = time.perf_counter()
        try:
            inspection = self._memory.inspect(item.slot, item.nbytes)
        except torch.OutOfMemoryError as error:
            self._no_room(item, started, error)
            return
        self._inspected.append((item, started, inspection))

    def ended(self) -> list[Emptied]:
        """Return and forget the parts that are unpacked or faulty."""
        found = self._judged()
        while self._moved and self._moved[0][2].done():
            item, started, _, fault = self._moved.popleft()
            found.append(Emptied(item, started, fault))
        return found

    def _judged(self) -> list[Emptied]:
        wrong = []
        while self._inspected and self._inspected[0][2].done():
            item, started, inspection = self._inspected.popleft()
            fault = fault_of_slot(inspection.found(), item, self._fingerprint)
            if fault is not None:
                wrong.append(Emptied(item, started, fault))
                continue
            assert item.slot is not None, "copies are judged by their tags"
            packed = self._parts.packing(item)
            kv_cache = self._parts.kv_cache
            try:
                move = self._memory.unpack(item.slot, packed.ids, kv_cache, packed.packing)
            except torch.OutOfMemoryError as error:
                self._no_room(item, started, error)
                continue
            self._moved.append((item, started, move, None))
        return wrong

    def _no_room(self, item: Unpack, started: float, error: torch.OutOfMemoryError) -> None:
        logger.warning("part %d of %s cannot be unpacked: %s", item.index, item.key, error)
        fault = FailCause.INTERNAL, "the device has no room to unpack a part"
        self._moved.append((item, started, self._memory.mark(), fault))


LEAST_NAP_SECONDS = 2e-5
LOOK_SECONDS = 0.1
"""Interval of checks for reads that hang."""
COPY_SECONDS = 0.05
"""Maximum time of a copy between GPUs of one machine."""


class Ended(NamedTuple):
    """A read that is terminal, or whose state is unknown."""

    read: Read
    progress: Progress
    started: float
    """Start by ``time.perf_counter``."""
    tags: bytes = b""
    """Tags of a finished copy's blocks, read after it."""
    late: bool = False
    """Whether it was begun on another link than the current one."""


@dataclass(slots=True)
class _Life:
    """Times of a link that is up, by ``time.perf_counter``."""

    since: float
    moved: float
    """Last end of a read, or the link's start."""


class Reads:
    """Reads under way, for the transfer thread."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        layout: KVLayout,
        shard: Shard,
        notify: Callable[[], None],
    ) -> None:
        """``notify`` wakes the engine's thread when ``expected`` is known."""
        self._transports = transports
        self._notify = notify
        self.expected = math.inf
        """Predicted end of the first copy, by ``time.monotonic``; inf if unknown. Read by any
        thread."""
        self._groups = layout.groups
        self._end = End(layout.block_size, layout.block_bytes, shard)
        self._open: dict[tuple[str, Ticket], tuple[Read, float]] = {}
        self._timed = [each for each in transports.values() if isinstance(each, Timed)]
        self._lives: dict[Incarnation, _Life] = {}
        self._looked_at = float("-inf")
        self._copied_at = float("-inf")
        """Start of the last copy, or read into a GPU's slot."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def link_up(self, peer: Incarnation) -> None:
        """Start the times of a new link, without earlier reads."""
        now = time.perf_counter()
        self._lives[peer] = _Life(now, now)

    def link_lost(self, peer: Incarnation) -> None:
        self._lives.pop(peer, None)

    def hung(self, seconds: float) -> list[Incarnation]:
        """Return the peers with a read that has been open for longer, without the end of another
        since. Copies into blocks do not count (see ``old_copies``)."""
        now = time.perf_counter()
        between = min(LOOK_SECONDS, seconds / 4)
        since = now - self._looked_at
        if since < between:
            return []
        self._looked_at = now
        if since > seconds / 2:  # this thread stood still, which may be the cause
            return []
        found = []
        for read, started in self._open.values():
            life = self._lives.get(read.peer)
            if read.slot is None or life is None or started < max(life.since, life.moved):
                continue
            if now - started > seconds:
                life.moved = now  # reported once
                found.append(read.peer)
        return found

    def stuck(self, seconds: float, quota: int) -> set[Incarnation]:
        """Return the peers whose whole quota of reads into slots was begun longer ago. No link to
        them is probed until one ends. Callable from any thread."""
        before = time.perf_counter() - seconds
        opened = list(self._open.values())  # a copy: the transfer thread goes on
        old = (read.peer for read, at in opened if read.slot is not None and at < before)
        return {peer for peer, count in Counter(old).items() if count >= quota}

    def old_copies(self, seconds: float) -> int:
        """Return the number of copies into blocks begun longer ago. Callable from any thread."""
        before = time.perf_counter() - seconds
        opened = list(self._open.values())  # a copy: the transfer thread goes on
        return sum(read.slot is None and at < before for read, at in opened)

    def left(self) -> frozenset[RequestKey]:
        """Return the keys whose blocks may still be written after the transports have stopped."""
        left = {name for name, each in self._transports.items() if _is_copying(each)}
        opened = self._open.items()
        return frozenset(
            read.key for (name, _), (read, _) in opened if name in left and read.slot is None
        )

    def start(
        self, item: Read, welcome: ProducerCard, slots: SlotMemory, check: Check = Check.HEADER
    ) -> None:
        """Begin a read of the peer that sent this WELCOME; ``slots`` are D's own."""
        if item.slot is None or item.remote_slot is None:
            extents = self._blocks(item, welcome)
        else:
            extents = [
                slot_extent(
                    item.slot,
                    item.remote_slot,
                    item.nbytes,
                    slot_bytes=slots.slot_bytes,
                    remote_slot_bytes=welcome.slot_bytes,
                    check=check,
                )
            ]
        started = time.perf_counter()
        ticket = self._transports[welcome.connector].read(item.peer, extents)
        self._open[(welcome.connector, ticket)] = (item, started)
        if item.slot is None or slots.gpu is not None:
            self._copied_at = time.monotonic()
        if item.slot is None:
            known = self.expected < math.inf
            self._foretell()
            if self.expected < math.inf and not known:
                self._notify()

    def _foretell(self) -> None:
        moment = min(filter(is_foretold, self._moments()), default=math.inf)
        self.expected = moment - time.perf_counter() + time.monotonic()

    def _blocks(self, item: Read, welcome: ProducerCard) -> Sequence[Extent]:
        blocks = item.block_ids, item.remote_blocks
        if item.form is None:
            return BlockExtents(*blocks, self._end.block_bytes)
        shard = Shard(welcome.tensor_parallel_rank, welcome.tensor_parallel_size)
        theirs = End(item.form.block_size, welcome.block_bytes, shard)
        group = self._groups[item.group]
        if group.kind is KVKind.STATE:
            return state_extents(*blocks, group, self._end, theirs)
        return part_extents(*blocks, item.start, item.stop, group, self._end, theirs)

    def ended(self) -> list[Ended]:
        """Return and forget terminal reads; return reads of unknown state once each."""
        for name in {name for name, _ in self._open}:  # other transports have no reads
            self._transports[name].advance()
        found = []
        for (name, ticket), (read, started) in list(self._open.items()):
            progress = self._transports[name].poll(ticket)
            if progress is Progress.PENDING:
                continue
            tags, late = b"", False
            if progress is not Progress.UNKNOWN:
                del self._open[(name, ticket)]
                life = self._lives.get(read.peer)
                late = life is None or started < life.since
                if life is not None and not late:
                    life.moved = time.perf_counter()
                if progress is Progress.DONE and read.slot is None:
                    tags = self._transports[name].tags_of(ticket)
            found.append(Ended(read, progress, started, tags, late))
        if found:
            self._foretell()
        return found

    def nap(self, usual: Callable[[], float]) -> float:
        """Return the seconds until the next poll: until shortly before a copy's predicted end; 0.05
        if sockets wake the thread; short for a young copy without a prediction; else ``usual``."""
        foretold = nap_before(self._moments())
        if self.wakers():
            return 0.05 if foretold is None else max(LEAST_NAP_SECONDS, foretold)
        if foretold is not None:
            return max(LEAST_NAP_SECONDS, foretold)
        age = time.monotonic() - self._copied_at
        return max(LEAST_NAP_SECONDS, age / 32) if age < COPY_SECONDS else usual()

    def watch(self, until: Callable[[], bool]) -> bool:
        """Poll without a pause while a copy is likely to end, or until ``until`` is true; return
        False at once if none is."""
        return watch(self._moments(), lambda: until() or any(e.stirs() for e in self._timed))

    def wakers(self) -> list[int]:
        found: list[int] = []
        for name in {name for name, _ in self._open}:
            descriptors = self._transports[name].filenos()
            if not descriptors:
                return []
            found += descriptors
        return found

    def _moments(self) -> list[float]:
        return [moment for each in self._timed for moment in each.moments()]


def _is_copying(transport: Transport) -> bool:
    return isinstance(transport, Timed) and bool(transport.moments())
