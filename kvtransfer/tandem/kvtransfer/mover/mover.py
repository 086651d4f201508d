"""Loop of the transfer thread: take items, move bytes, sleep as long as possible.

Naps are short while a transport needs calls to move bytes, grow while nothing happens, and are
endless when nothing is due.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.channel import Channel, now_ms
from tandem.kvtransfer.control.mail import (
    FromPeer,
    LinkDown,
    LinkNumber,
    LinkUp,
    SendMessage,
)
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import Action, Millis, Pack, Unpack
from tandem.kvtransfer.handoff.manifest import Group
from tandem.kvtransfer.handoff.messages import Message
from tandem.kvtransfer.memory.blocks import Blocks, BlockTags, SharedTags
from tandem.kvtransfer.memory.packing import (
    HEADER_BYTES,
    Packing,
    packing_of,
    part_ids,
)
from tandem.kvtransfer.memory.slots import SlotMemory, SlotSizes
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.transports.base import Region, Transport
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.link.naps import nap_precisely
from tandem.link.wake_queue import SHORT_SECONDS, WakeQueue
from tandem.protocol.card import DTYPE_BYTES, Fingerprint, KVLayout, Shard
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import BlockTables


@dataclass(frozen=True, slots=True)
class Reserved:
    """The engine has blocks for tokens [from_token, to_token)."""

    key: RequestKey
    tables: BlockTables
    from_token: int
    to_token: int
    hashes: tuple[BlockHash, ...] = ()
    """Hashes of the full blocks, if tags are compared."""


@dataclass(frozen=True, slots=True)
class SleepState:
    """Sleep state of the engine, which sends no items while it sleeps."""

    asleep: bool


FromEngine = d_events.Opened | Reserved | d_events.Cancel | SleepState
ConsumerItem = FromEngine | LinkUp | LinkDown | FromPeer


logger = logging.getLogger(__name__)

Event = TypeVar("Event")
Item = TypeVar("Item")

NAP_SECONDS = 0.0002
AWAKE_SECONDS = 0.006
"""Seconds of naps after notice of an item that is due within moments."""
MOVE_NAP_SECONDS = 5e-5
"""Nap while a device packs or unpacks."""
YIELD_SECONDS = 5e-5
STOP_SECONDS = 10.0
SETTLE_SECONDS = 5.0
"""Maximum wait for a device's remaining work when the thread ends."""
_NAPS = ((0.05, NAP_SECONDS), (1.0, 0.001), (10.0, 0.01))
_LONGEST_NAP = 0.05
_LONGEST_DOZE = 0.2
_DOZE_AFTER = 1.0


@dataclass(frozen=True, slots=True)
class MoverParts:
    """Parts shared by both movers."""

    config: KVTransferConfig
    incarnation: Incarnation
    fingerprint: Fingerprint
    layout: KVLayout
    kv_cache: Tensor
    """uint8 [num_blocks, block_bytes]."""
    kv_scales: tuple[Tensor, ...]
    """Scales of codes by group, float32 [rows], next to the KV cache."""
    transports: dict[str, Transport]
    board: ProgressBoard
    metrics: HandoffMetrics
    notify: Callable[[], None]

    def groups(self, sizes: SlotSizes) -> tuple[Group, ...]:
        """Return the layout's groups with the blocks of a part (those that fit a slot) and of a
        copy (those that any transport reads at once)."""
        most = min((each.traits.max_extents for each in self.direct.values()), default=1)
        room = sizes.slot_bytes - HEADER_BYTES
        return tuple(
            Group(
                kind=group.kind,
                span=group.span,
                block_bytes=group.block_bytes,
                blocks_per_part=max(1, room // group.block_bytes),
                blocks_per_copy=most,
                part_bytes=room,
                rows=group.num_rows,
                item_bytes=DTYPE_BYTES[group.dtype],
            )
            for group in self.layout.groups
        )

    def packing(self, item: Pack | Unpack) -> Packed:
        group = self.layout.groups[item.group]
        ids = part_ids(item.block_ids, item.start, item.stop, group, item.form)
        scales = self.kv_scales[item.group]
        return Packed(packing_of(item.form, group, self.layout.block_bytes, scales), ids)

    @property
    def shard(self) -> Shard:
        """Return the KV cache's shard of the heads: there is one rank."""
        return Shard(0, self.fingerprint.tensor_parallel_size)

    @property
    def direct(self) -> dict[str, Transport]:
        """Return the transports that copy blocks into blocks, by name."""
        found = self.transports.items()
        return {name: each for name, each in found if each.traits.lands_in is Region.BLOCKS}

    def blocks(self) -> Blocks | None:
        if not self.direct:
            return None
        shared = any(each.traits.maps_memory for each in self.direct.values())
        tags = SharedTags(len(self.kv_cache)) if shared else BlockTags(len(self.kv_cache))
        return Blocks(self.kv_cache, tags)


class Packed(NamedTuple):
    """Packing and block numbers for slots."""

    packing: Packing
    ids: Sequence[int]


class Mover(Generic[Item, Event]):
    """A transfer thread."""

    name = "kv-transfer"
    engine_first = True
    memory: SlotMemory
    """Slots of parts."""

    def __init__(self, parts: MoverParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.metrics = parts.metrics
        self.inbox: WakeQueue[Item | None] = WakeQueue()
        self.ending: str | None = None
        """Reason why nothing more is begun: the thread has ended, or is about to."""
        self.problem: str | None = None
        """Reason why the thread has ended; set after its work."""
        self.written: frozenset[RequestKey] = frozenset()
        """Hand-offs whose blocks may still be written, if there is a ``problem``."""
        self.control: Channel | None = None
        """Set before ``start``."""
        self._outbox: deque[Event] = deque()
        self._has_events = False
        self._has_sent = False
        self._links: dict[Incarnation, LinkNumber] = {}
        self._active_at = self._observed_at = time.monotonic()
        self._awake_until = 0.0
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        elif self.problem is None:
            self._end("the KV transfer was never started")

    @property
    def alive(self) -> bool:
        """Return whether posted items will still be handled."""
        return self.problem is None

    def events(self) -> list[Event]:
        events = []
        while self._outbox:  # only this thread takes
            events.append(self._outbox.popleft())
        return events

    # Methods of a half.

    def take(self, item: Item, now: Millis) -> list[Action]:
        """Run the tables on an item."""
        raise NotImplementedError

    def execute(self, action: Action, now: Millis) -> list[Action]:
        """Execute an action of a table; return the actions that follow at once."""
        raise NotImplementedError

    def work(self, now: Millis) -> list[Action]:
        """Move bytes, a piece at a time, and check deadlines."""
        raise NotImplementedError

    def rest(self, now: Millis) -> float | None:
        """Return the seconds to sleep; 0 is not at all, None until something comes."""
        raise NotImplementedError

    def wakers(self) -> Sequence[int]:
        """Return other descriptors to wake for."""
        return ()

    def pause(self, seconds: float | None) -> None:
        """Sleep at most ``seconds`` until an item comes, and serve the sockets."""
        wakers, open_still = self.wakers(), False
        if self.control is None:
            pass
        elif seconds is not None and seconds < SHORT_SECONDS:
            open_still = self.control.nap(self.inbox, seconds, wakers)
        else:
            open_still = self.control.attend(self.inbox, seconds, wakers)
        if not open_still:
            self.inbox.wait(seconds, wakers)

    def serve_sockets(self) -> bool:
        """Serve the sockets once; return whether something has come."""
        if self.control is not None:
            self.control.look()
        return not self.inbox.empty

    def still_written(self, settled: bool) -> frozenset[RequestKey]:
        """Return the hand-offs whose blocks may still be written after the transports have stopped;
        ``settled`` is False if slots may be, too."""
        return frozenset()

    def settle(self) -> None:
        """Count what was deferred, at the end of each turn."""

    def observe(self) -> None:
        raise NotImplementedError

    # Methods that both halves share.

    def send_message(self, peer: Incarnation, message: Message) -> None:
        """Send on the current link, if there is one."""
        link = self._links.get(peer)
        if link is not None and self.control is not None:
            self.control.post(SendMessage(link, message))
            self._has_sent = True

    def queue_event(self, event: Event) -> None:
        """Queue for the engine's thread and wake it."""
        self._outbox.append(event)
        self.parts.notify()
        self._has_events = True

    def active(self) -> None:
        self._active_at = time.monotonic()

    def stay_awake(self) -> None:
        """Keep the thread awake for an item that is due within moments."""
        self._awake_until = time.monotonic() + AWAKE_SECONDS

    def nap(self) -> float:
        """Return how long to sleep while bytes are in transit."""
        quiet = time.monotonic() - self._active_at
        return next((nap for until, nap in _NAPS if quiet < until), _LONGEST_NAP)

    def doze(self) -> float:
        """Return how long to sleep while only given-up reads may be in transit."""
        return self.nap() if time.monotonic() - self._active_at < _DOZE_AFTER else _LONGEST_DOZE

    def until(self, deadline: Millis | None, now: Millis) -> float | None:
        return None if deadline is None else max(0.0, (deadline - now) / 1000)

    def _run(self) -> None:
        nap_precisely()
        try:
            if self.parts.kv_cache.is_cuda:  # UCX, too, requires the thread's device
                torch.cuda.set_device(self.parts.kv_cache.device)
            while self._turn():
                pass
        except Exception as error:
            logger.exception("the transfer thread ends")
            self._end(f"the KV transfer thread ended: {error!r}")
        else:
            self._end("the KV transfer has been closed")

    def _end(self, problem: str) -> None:
        self.ending = problem  # at once: work under way may take seconds
        self.parts.notify()
        for transport in self.parts.transports.values():
            with contextlib.suppress(Exception):
                transport.stop()
        settled = False
        with contextlib.suppress(Exception):
            settled = self.memory.settle(SETTLE_SECONDS)
        self.written = self.still_written(settled)
        self.problem = problem
        self.inbox.close()
        self.parts.notify()

    def _turn(self) -> bool:
        now = now_ms()
        items = self.inbox.take()
        for item in items:
            if item is None:
                return False
            self._carry_out(self.take(item, now), now)
        self._let_go()  # before work, which may delay a peer
        self._carry_out(self.work(now), now)
        self._let_go()
        self.settle()
        if items or self._observed_at < self._active_at:
            self._observed_at = time.monotonic()
            self.observe()
        seconds = self.rest(now_ms())
        if self._awake_until > time.monotonic():
            seconds = MOVE_NAP_SECONDS if seconds is None else min(seconds, MOVE_NAP_SECONDS)
        if seconds is None or seconds > 0:
            self.pause(seconds)
        elif self.control is not None:
            self.control.look()
        return True

    def _let_go(self) -> None:
        if self._has_sent and not self.engine_first:
            self._send()
        if self._has_events:
            self._has_events = False
            time.sleep(YIELD_SECONDS)
        if self._has_sent:
            self._send()

    def _send(self) -> None:
        self._has_sent = False
        if self.control is not None:
            self.control.look()

    def _carry_out(self, actions: Iterable[Action], now: Millis) -> None:
        queue = deque(actions)
        while queue:
            queue.extend(self.execute(queue.popleft(), now))
