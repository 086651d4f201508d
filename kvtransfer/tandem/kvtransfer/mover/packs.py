"""Packing of P's parts into slots: begun in order, packed when the device reports it."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

import torch

from tandem.kvtransfer.handoff.actions import Pack
from tandem.kvtransfer.memory.header import HEADER_BYTES, Header, fingerprint_digest, key_digest
from tandem.kvtransfer.memory.slots import Move, SlotMemory
from tandem.kvtransfer.mover.mover import MoverParts

logger = logging.getLogger(__name__)


class Filling(NamedTuple):
    """A part that a slot is filled with."""

    item: Pack
    nbytes: int
    """Header and payload."""
    started: float
    """Start by ``time.perf_counter``."""
    move: Move
    ok: bool
    """True if the slot has the whole part in the end."""


class Packs:
    """Used by the transfer thread alone."""

    def __init__(self, parts: MoverParts, memory: SlotMemory) -> None:
        self._parts = parts
        self._memory = memory
        self._waiting: deque[Pack] = deque()
        self._begun: deque[Filling] = deque()
        """Begun parts in the order in which they end."""
        self._fingerprint = fingerprint_digest(parts.fingerprint.compatibility)

    def add(self, item: Pack) -> None:
        """Queue a part."""
        self._waiting.append(item)

    @property
    def waits(self) -> bool:
        """Return whether there is a ``next``."""
        return bool(self._waiting)

    @property
    def under_way(self) -> bool:
        """Return whether ``ended`` is to be called again."""
        return bool(self._begun)

    def next(self) -> Pack:
        """Remove and return the oldest queued part. One at a time, so that messages need not
        wait."""
        return self._waiting.popleft()

    def begin(self, item: Pack) -> None:
        """Begin to pack a part; its hand-off must still hold the blocks. If the device has no room
        for the intermediate data, the part fails after its queued work."""
        started, parts = time.perf_counter(), self._parts
        packed = parts.packing(item.form, item.block_ids, item.start, item.stop)
        nbytes = HEADER_BYTES + len(packed.ids) * packed.packing.block_bytes(parts.slab)
        header = Header(
            key=key_digest(item.key),
            fingerprint=self._fingerprint,
            producer=parts.incarnation,
            part=item.index,
            group=item.group,
            start=item.start,
            stop=item.stop,
            nbytes=nbytes,
            digest=0,  # of what is not packed yet
        )
        ok = True
        try:
            move = self._memory.pack(parts.slab, packed.ids, item.slot, header, packed.packing)
        except torch.OutOfMemoryError as error:
            logger.warning("part %d of %s cannot be packed: %s", item.index, item.key, error)
            move, ok = self._memory.mark(), False
        self._begun.append(Filling(item, nbytes, started, move, ok))

    def ended(self) -> list[Filling]:
        """Return and forget the parts that are packed, or failed."""
        found = []
        while self._begun and self._begun[0].move.done():
            found.append(self._begun.popleft())
        return found
