"""A transport within one process: copies between slots, or from block to block.

Producers are found by their card in a table of this module. ``hold`` keeps reads pending, so that
a test decides when a read lands, even one that is not wanted any more.

``memory_blocks`` writes D's blocks directly. It may, because D's transfer thread itself copies: a
copy is over when ``poll`` returns, and none is made after ``stop``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import CLEARED, Blocks
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.transports.base import (
    Check,
    Extent,
    Progress,
    Region,
    Ticket,
    Traits,
    Transport,
)
from tandem.protocol.ids import Incarnation


class _Regions(NamedTuple):
    slots: SlotMemory
    blocks: Blocks | None


_served: dict[bytes, _Regions] = {}
_lock = threading.Lock()
_cards = itertools.count()

_SLOTS = Traits(name="memory", needs_advance=False, max_extents=1 << 16)
_BLOCKS = Traits(
    name="memory_blocks",
    needs_advance=False,
    lands_in=Region.BLOCKS,
    fenced=True,
    max_extents=1 << 16,
    max_pieces=1 << 16,
)


class MemoryTransport:
    def __init__(self, *, direct: bool = False) -> None:
        """``direct``: KV goes from blocks into blocks."""
        self.traits = _BLOCKS if direct else _SLOTS
        self._tickets = itertools.count()
        self._reads: dict[Ticket, tuple[bytes, tuple[Extent, ...]]] = {}
        self._tags: dict[Ticket, bytes] = {}
        self._cards: dict[Incarnation, bytes] = {}
        self._here: _Regions | None = None
        self._card: bytes | None = None
        self.hold = threading.Event()
        """Set: reads stay pending."""

    def serve(self, memory: SlotMemory, blocks: Blocks | None = None) -> bytes:
        """Enter slots and blocks into the table."""
        regions = self._regions(memory, blocks)
        with _lock:
            self._card = b"memory-%d" % next(_cards)
            _served[self._card] = regions
        return self._card

    def receive(self, memory: SlotMemory, blocks: Blocks | None = None) -> None:
        self._here = self._regions(memory, blocks)

    def _regions(self, memory: SlotMemory, blocks: Blocks | None) -> _Regions:
        if blocks is not None and blocks.kv_cache.device.type != "cpu":
            where = blocks.kv_cache.device
            raise TransportError(f"{self.traits.name}: the slab is on {where}, allowed is cpu")
        return _Regions(memory, blocks)

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        if card not in _served:
            raise TransportError("memory: the producer is not in this process")
        self._cards[peer] = card

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        """Note it; the copy is made by ``poll``."""
        ticket = Ticket(next(self._tickets))
        self._reads[ticket] = (self._cards.get(peer, b""), tuple(extents))
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        if self.hold.is_set():
            return Progress.PENDING
        card, extents = self._reads.pop(ticket)
        source, here = _served.get(card), self._here
        if source is None or here is None:
            return Progress.FAILED
        if not all(_has(source, each) for each in extents):
            return Progress.FAILED
        tagged = [each.remote.offset for each in extents if each.check is Check.TAG]
        blocks = source.blocks
        numbers = [] if blocks is None else [each // blocks.kv_cache.shape[1] for each in tagged]
        turns = [] if blocks is None else [blocks.tags.turn(each) for each in numbers]
        for each in extents:
            _copy(source, here, each)
        if tagged and blocks is not None:
            self._tags[ticket] = b"".join(
                blocks.tags.read(each) if blocks.tags.turn(each) == turn else CLEARED
                for each, turn in zip(numbers, turns, strict=True)
            )
        return Progress.DONE

    def tags_of(self, ticket: Ticket) -> bytes:
        return self._tags.pop(ticket, b"")

    def advance(self) -> None:
        """Nothing moves by itself."""

    def filenos(self) -> list[int]:
        return []

    def close(self, peer: Incarnation) -> None:
        """Later reads of the peer fail; earlier ones may still land."""
        self._cards.pop(peer, None)

    def stop(self) -> None:
        if self._card is not None:
            with _lock:
                _served.pop(self._card, None)


def _has(source: _Regions, extent: Extent) -> bool:
    if extent.remote.region is Region.SLOTS:
        return source.slots.is_within_a_slot(extent.remote.offset, extent.nbytes)
    offset, size = extent.remote.offset, extent.nbytes
    return source.blocks is not None and 0 <= offset <= source.blocks.kv_cache.numel() - size


def _copy(source: _Regions, here: _Regions, extent: Extent) -> None:
    if extent.local.region is Region.SLOTS:
        taken = source.slots.span(extent.remote.offset, extent.nbytes)
        here.slots.span(extent.local.offset, extent.nbytes)[:] = taken
    else:
        assert source.blocks is not None
        assert here.blocks is not None, "a transport of blocks is given some"
        target = here.blocks.kv_cache.view(-1)[extent.local.offset :][: extent.nbytes]
        target.copy_(source.blocks.kv_cache.view(-1)[extent.remote.offset :][: extent.nbytes])


_NAMES = ("memory", "memory_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess(KVTransferConfig):
    """The configuration of an end whose transport is of this module."""

    transport: str


def kv_config(kv_connector: str, **fields: Any) -> KVTransferConfig:
    """Return a configuration with the connector, which may be ``memory`` or ``memory_blocks``."""
    if kv_connector in _NAMES:
        return InProcess(transport=kv_connector, kv_connector="tcp", **fields)
    return KVTransferConfig(kv_connector=kv_connector, **fields)


def transports_of(config: KVTransferConfig) -> dict[str, Transport] | None:
    """Return a new transport of an ``InProcess`` configuration; None for any other."""
    if not isinstance(config, InProcess):
        return None
    return {config.transport: MemoryTransport(direct=config.transport == "memory_blocks")}
