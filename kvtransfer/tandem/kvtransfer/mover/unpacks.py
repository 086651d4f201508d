"""D's parts on their way out of slots: looked into and judged, then unpacked if they are right.

Each of the two may be queued on a device: parts follow each other through both.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

import torch

from tandem.kvtransfer.handoff.actions import Unpack
from tandem.kvtransfer.memory.header import fingerprint_digest
from tandem.kvtransfer.memory.slots import Inspection, Move, SlotMemory
from tandem.kvtransfer.mover.identity import Fault, fault_of_slot
from tandem.kvtransfer.mover.mover import MoverParts
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import RequestKey

logger = logging.getLogger(__name__)


class Emptied(NamedTuple):
    """A part that is out of its slot, or will never be."""

    item: Unpack
    started: float
    """Start by ``time.perf_counter``."""
    fault: Fault | None


class Unpacks:
    """Used by the transfer thread alone."""

    def __init__(self, parts: MoverParts, memory: SlotMemory) -> None:
        self._parts = parts
        self._memory = memory
        self._waiting: deque[Unpack] = deque()
        self._inspected: deque[tuple[Unpack, float, Inspection]] = deque()
        """Inspected parts in the order in which they end, like the moved ones."""
        self._moved: deque[tuple[Unpack, float, Move, Fault | None]] = deque()
        self._fingerprint = fingerprint_digest(parts.fingerprint.compatibility)

    def add(self, item: Unpack) -> None:
        """Queue a part."""
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
        """Return the faulty parts; begin to unpack the others."""
        wrong = []
        while self._inspected and self._inspected[0][2].done():
            item, started, inspection = self._inspected.popleft()
            fault = fault_of_slot(inspection.found(), item, self._fingerprint)
            if fault is not None:
                wrong.append(Emptied(item, started, fault))
                continue
            assert item.slot is not None, "copies are judged by their tags"
            packed = self._parts.packing(item.form, item.block_ids, item.start, item.stop)
            slab = self._parts.slab
            try:
                move = self._memory.unpack(item.slot, packed.ids, slab, packed.packing)
            except torch.OutOfMemoryError as error:
                self._no_room(item, started, error)
                continue
            self._moved.append((item, started, move, None))
        return wrong

    def _no_room(self, item: Unpack, started: float, error: torch.OutOfMemoryError) -> None:
        """Fail a part after its queued work: only its hand-off fails."""
        logger.warning("part %d of %s cannot be unpacked: %s", item.index, item.key, error)
        fault = FailCause.INTERNAL, "the device has no room to unpack a part"
        self._moved.append((item, started, self._memory.mark(), fault))
