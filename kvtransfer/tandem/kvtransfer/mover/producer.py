"""P's transfer thread: waits for fences, sends packed slots, and alone sends COMMITTED."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from tandem.kvtransfer.config import millis
from tandem.kvtransfer.control.mail import (
    Drop,
    FromPeer,
    LinkDown,
    LinkUp,
    MessageTooLong,
)
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.events import LoadFailed, ProducerEvent
from tandem.kvtransfer.handoff import export as p_events
from tandem.kvtransfer.handoff.actions import (
    Action,
    Count,
    EmitEvent,
    Millis,
    Pack,
    Send,
    Tag,
    Untag,
)
from tandem.kvtransfer.handoff.export import Export, ProducerPolicy
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.handoff.lease import ready_message
from tandem.kvtransfer.handoff.manifest import why_not_carried
from tandem.kvtransfer.handoff.messages import (
    Committed,
    GoneReason,
    Probe,
    ProbeDone,
    ProbeReady,
    ProducerCard,
)
from tandem.kvtransfer.handoff.pull import SlotRing
from tandem.kvtransfer.handoff.tables import PState
from tandem.kvtransfer.memory.blocks import tags_from
from tandem.kvtransfer.memory.packing import (
    HEADER_BYTES,
    Header,
    fingerprint_digest,
    key_digest,
)
from tandem.kvtransfer.memory.slots import Move, SlotMemory
from tandem.kvtransfer.mover.make_slots import pattern, slots_for
from tandem.kvtransfer.mover.mover import MOVE_NAP_SECONDS, Mover, MoverParts
from tandem.kvtransfer.transports.base import why_unmet
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import BlockTables, Fence

logger = logging.getLogger(__name__)


class Filling(NamedTuple):
    """A part that is being packed."""

    item: Pack
    nbytes: int
    """Header and payload."""
    started: float
    """Start by ``time.perf_counter``."""
    move: Move
    ok: bool
    """Whether the slot has the whole part in the end."""


class Packs:
    """Parts that are packed, for the transfer thread."""

    def __init__(self, parts: MoverParts, memory: SlotMemory) -> None:
        self._parts = parts
        self._memory = memory
        self._waiting: deque[Pack] = deque()
        self._begun: deque[Filling] = deque()
        """Begun parts in the order in which they end."""
        self._fingerprint = fingerprint_digest(parts.fingerprint.compatibility)

    def add(self, item: Pack) -> None:
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
        """Remove and return the oldest queued part."""
        return self._waiting.popleft()

    def begin(self, item: Pack) -> None:
        """Begin to pack a part; its hand-off must still hold the blocks. Without room on the
        device, the part fails after its queued work."""
        started, parts = time.perf_counter(), self._parts
        packed = parts.packing(item)
        nbytes = HEADER_BYTES + len(packed.ids) * packed.packing.block_bytes(parts.kv_cache)
        header = Header(
            key=key_digest(item.key),
            fingerprint=self._fingerprint,
            producer=parts.incarnation,
            part=item.index,
            group=item.group,
            start=item.start,
            stop=item.stop,
            nbytes=nbytes,
            digest=0,  # unknown before packing
        )
        ok = True
        try:
            move = self._memory.pack(parts.kv_cache, packed.ids, item.slot, header, packed.packing)
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


@dataclass(frozen=True, slots=True)
class Computed:
    """The engine launched a chunk; ``fence`` is after its last KV write."""

    key: RequestKey
    tables: BlockTables
    upto: int
    fence: Fence
    hashes: tuple[BlockHash, ...] = ()
    """Hashes of the full blocks, if tags are used."""


FromEngine = (
    p_events.Admit
    | p_events.Refuse
    | p_events.Begun
    | p_events.First
    | p_events.Finished
    | p_events.Cancel
    | Computed
)
ProducerItem = FromEngine | LinkUp | LinkDown | FromPeer | MessageTooLong


class ProducerMover(Mover[ProducerItem, ProducerEvent]):
    """Owner of the export table and the send slots."""

    name = "kv-transfer-p"
    engine_first = False  # COMMITTED is more urgent than free blocks

    def __init__(self, parts: MoverParts) -> None:
        super().__init__(parts)
        config = parts.config
        count = config.kv_slots
        self._slots = slots_for(config, count, parts.kv_cache, parts.transports, spare=1)
        self.memory, sizes = self._slots.memory, self._slots.sizes
        self._write_patterns(count)
        policy = ProducerPolicy(
            block_size=parts.layout.block_size,
            groups=parts.groups(sizes),
            header_bytes=HEADER_BYTES,
            lease_ms=millis(config.kv_lease_seconds),
            expect_ms=millis(config.kv_expect_seconds),
            tombstone_ms=millis(config.kv_tombstone_seconds),
            wait_ms=millis(config.kv_wait_seconds),
        )
        self.table = ExportTable(policy, SlotRing(count, config.kv_slots_per_peer))
        direct, self.blocks = parts.direct, parts.blocks()
        self._cards: dict[str, bytes] = {}
        for name, each in list(parts.transports.items()):
            try:
                blocks = self.blocks if name in direct else None
                self._cards[name] = each.serve(self._slots.of(each.traits), blocks)
            except TransportError as error:
                if len(parts.transports) < 2:
                    raise
                logger.warning("KV does not go by %s: %s", name, error)
                del parts.transports[name]
        unmet = [why_unmet(each) for each in parts.transports.values()]
        if unmet[0] is not None and None not in unmet:  # still offered, next to others
            for each in parts.transports.values():
                each.stop()
            raise TransportError(unmet[0])
        self._direct_links: set[Incarnation] = set()
        self._hashes: dict[RequestKey, tuple[BlockHash, ...]] = {}
        self._link_view: frozenset[Incarnation] = frozenset()
        self._over: str | None = None
        """Reason why no link is made any more."""
        self._fences: list[Computed] = []
        self._packs = Packs(parts, self.memory)
        self._needs_advance = [
            each for each in parts.transports.values() if each.traits.needs_advance
        ]

    @property
    def links(self) -> frozenset[Incarnation]:
        """Return the consumers whose link is up; callable from the engine's thread."""
        return self._link_view

    def copies(self, consumer: Incarnation) -> bool:
        """Return whether a consumer's link copies blocks; callable from the engine's thread."""
        return consumer in self._direct_links

    def welcome(self, connectors: tuple[str, ...]) -> ProducerCard | str:
        """Return the answer to a HELLO with these transports, or why not. Control thread only."""
        refused = self._over or why_not_carried(self.parts.layout)
        if refused is not None:
            return refused
        for name in connectors:
            if name in self._cards:
                slots = self._slots.of(self.parts.transports[name].traits)
                return ProducerCard(
                    connector=name,
                    card=self._cards[name],
                    slot_bytes=slots.slot_bytes,
                    num_slots=self.config.kv_slots,
                    block_bytes=self.parts.layout.block_bytes,
                    num_blocks=len(self.parts.kv_cache),
                    groups=tuple(each.kind for each in self.parts.layout.groups),
                    block_size=self.parts.layout.block_size,
                    tensor_parallel_size=self.parts.fingerprint.tensor_parallel_size,
                    wire_dtype=WireDtype(self.config.kv_wire_dtype),
                    dtypes=tuple(each.dtype for each in self.parts.layout.groups),
                )
        return f"no transport in common: {', '.join(connectors)}"

    def _write_patterns(self, slot: int) -> None:
        both = {id(each): each for each in (self._slots.memory, self._slots.patterns)}.values()
        smallest = min(each.slot_bytes for each in both)
        self._pattern_bytes = min(self.config.kv_probe_bytes, smallest)
        for memory in both:
            memory.write(slot, pattern(self.parts.incarnation, self._pattern_bytes))

    def take(self, item: ProducerItem, now: Millis) -> list[Action]:
        if isinstance(item, FromPeer):
            return self._take_message(item, now)
        if isinstance(item, LinkUp):
            self._links[item.peer] = item.link
            self._link_view = frozenset(self._links)
            self._direct_links.discard(item.peer)
            if item.connector in self.parts.direct:
                self._direct_links.add(item.peer)
            self.table.link_up(item.peer)
            return []
        if isinstance(item, LinkDown):
            return self._take_link_down(item, now)
        if isinstance(item, MessageTooLong):
            if self._links.get(item.peer) != item.link:
                return []
            return self.table.apply(p_events.Cancel(item.key, GoneReason.INTERNAL), now)
        if isinstance(item, Computed):
            self._fences.append(item)
            export = self.table.exports.get(item.key)
            if export is not None and export.direct:
                self._hashes[item.key] = item.hashes
                if item.upto == export.num_tokens and not item.fence.done():
                    self._wake_for(export)
            return self.table.apply(p_events.Launched(item.key, item.tables, item.upto), now)
        if isinstance(item, p_events.Admit):
            up = item.consumer in self.table.links
            direct = item.consumer in self._direct_links
            item = msgspec.structs.replace(item, link_up=up, direct=direct)
        return self.table.apply(item, now)

    def _wake_for(self, export: Export) -> None:
        """Send READY again shortly before the prompt's last KV is written, to wake D's threads."""
        self.stay_awake()
        if export.opened and export.begun and export.state is PState.COMPUTING:
            self.send_message(export.consumer, ready_message(export, self.table.policy))

    def _take_message(self, item: FromPeer, now: Millis) -> list[Action]:
        message, peer = item.message, item.peer
        if self._links.get(peer) != item.link:
            return [Count("p:message of an old link")]
        self.active()
        if isinstance(message, Probe):
            self.send_message(peer, ProbeReady(message.number, self._pattern_bytes))
            return []
        if isinstance(message, ProbeDone):
            return []
        return self.table.apply(p_events.ConsumerMessage(message.key, peer, message), now)  # type: ignore[union-attr, arg-type]

    def _take_link_down(self, item: LinkDown, now: Millis) -> list[Action]:
        if self._links.get(item.peer) != item.link:
            return []
        del self._links[item.peer]
        self._direct_links.discard(item.peer)
        self._link_view = frozenset(self._links)
        return self.table.link_lost(item.peer, now)

    def execute(self, action: Action, now: Millis) -> list[Action]:
        if isinstance(action, Send):
            if isinstance(action.message, Committed) and not action.message.key.is_pull:
                self.metrics.endings_of("producer", "committed").inc()
            self.send_message(action.to, action.message)
        elif isinstance(action, EmitEvent):
            if isinstance(action.event, LoadFailed) and not action.event.key.is_pull:
                self.metrics.failures.labels("producer", action.event.cause).inc()
            self.queue_event(action.event)  # type: ignore[arg-type]
        elif isinstance(action, Pack):
            self._packs.add(action)
        elif isinstance(action, Tag | Untag):
            self._tag(action)
        elif isinstance(action, Count):
            self.metrics.stray.labels(action.what).inc()
        return []

    def _tag(self, action: Tag | Untag) -> None:
        assert self.blocks is not None, "blocks have tags only if they are read"
        tags = self.blocks.tags
        if isinstance(action, Untag):
            self._hashes.pop(action.key, None)
            tags.clear(action.key)
            return
        key, blocks, hashes = action.key, action.block_ids, self._hashes.get(action.key, ())
        tags.set_many(key, blocks, tags_from(key, action.group, action.first, len(blocks), hashes))
        self._gave(len(action.block_ids) * self.parts.layout.groups[action.group].block_bytes)

    def work(self, now: Millis) -> list[Action]:
        actions = self._see_fences(now)
        if self._packs.waits:
            actions += self._begin_pack(self._packs.next(), now)
        if self._packs.under_way:
            actions += self._see_packs(now)
        for transport in self._needs_advance:  # always: reads that D gave up must end, too
            transport.advance()
        due = self.table.next_deadline()
        if due is not None and due <= now:
            actions += self.table.expire(now)
            self.observe()
        return actions

    def _see_fences(self, now: Millis) -> list[Action]:
        if not self._fences:
            return []
        seen = [each for each in self._fences if each.fence.done()]
        if not seen:
            return []
        self._fences = [each for each in self._fences if each not in seen]
        self.active()
        return [
            action
            for each in seen
            for action in self.table.apply(p_events.Fenced(each.key, each.upto), now)
        ]

    def _begin_pack(self, item: Pack, now: Millis) -> list[Action]:
        """Begin to pack, unless the hand-off has ended: its blocks may be reused or released
        then."""
        export = self.table.exports.get(item.key)
        if export is None or export.state is PState.GONE:
            return self.table.apply(p_events.Packed(item.key, item.index, ok=False), now)
        self._packs.begin(item)
        return []

    def _see_packs(self, now: Millis) -> list[Action]:
        actions: list[Action] = []
        for item, nbytes, started, _, ok in self._packs.ended():
            if ok:
                self.metrics.phase_of("pack").observe(time.perf_counter() - started)
                self._gave(nbytes)
            actions += self.table.apply(p_events.Packed(item.key, item.index, ok=ok), now)
        return actions

    def _gave(self, nbytes: int) -> None:
        """Count bytes that D may read: a part, or a chunk's blocks."""
        self.parts.board.transfers += 1
        self.metrics.moved("producer", nbytes)
        self.active()

    def rest(self, now: Millis) -> float | None:
        if self._packs.waits:
            return 0
        naps = [self.until(self.table.next_deadline(), now)]
        if self._packs.under_way:
            naps.append(MOVE_NAP_SECONDS)
        if self._fences or (self._needs_advance and self.table.num_parts_out):
            naps.append(self.nap())
        elif self._needs_advance:
            naps.append(self.doze())
        return min((each for each in naps if each is not None), default=None)

    def _end(self, problem: str) -> None:
        """Clear all tags before the engine takes its blocks back, and drop the links."""
        if self.blocks is not None:
            self.blocks.tags.clear_all()
        self._over = problem
        for link in self._links.values():
            if self.control is not None:
                self.control.post(Drop(link, problem))
        super()._end(problem)

    def observe(self) -> None:
        ring = self.table.ring
        self.metrics.slots_of("producer", "free").set(ring.free)
        self.metrics.slots_of("producer", "held").set(len(ring) - ring.free)
        self.metrics.leases.set(self.table.num_leased)
