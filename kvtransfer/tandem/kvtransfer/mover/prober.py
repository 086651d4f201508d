"""Probe of a new link: D reads P's known pattern before any request may use it.

Placement uses the pattern's rate. A busy machine slows probes, so an unused link is probed again a
few times, and its best rate counts.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from tandem.kvtransfer.config import KVTransferConfig, millis
from tandem.kvtransfer.control.client import PeerBook
from tandem.kvtransfer.errors import NotThereYet, TransportError
from tandem.kvtransfer.handoff.actions import Action, Millis, Read
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.messages import Message, Probe, ProbeDone, ProbeReady, ProducerCard
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.mover.make_slots import pattern
from tandem.kvtransfer.transports.base import Check, Transport
from tandem.protocol.ids import Incarnation, RequestKey

logger = logging.getLogger(__name__)

PROBE_KEY = RequestKey(b"", "probe", 0)
"""Key of receive slots for probes; no router has an empty incarnation."""
AGAIN_MS = (4_000, 16_000, 64_000)
"""Times after which an unused link is probed again."""
NO_SLOT = "its receive slots wait for reads that hang"
"""Reason why a link may stay down: earlier links hold the peer's quota of slots."""


@dataclass(slots=True)
class _Probing:
    """A link whose pattern has not been read."""

    number: int
    until: Millis
    nbytes: int | None = None
    """Known from PROBE_READY."""
    slot: int | None = None
    started: float = 0.0
    again: bool = False
    """Whether the link is in use after its first probe."""


@dataclass(slots=True)
class _Unused:
    """A link by which only its pattern has come."""

    best: float
    """Bytes per second of the fastest probe."""
    turns: int = 0
    """Number of repeated probes, including one that is about to begin."""
    at: Millis | None = None
    """Time of the next probe; None if there is none."""

    def next(self, now: Millis) -> None:
        left = self.turns < len(AGAIN_MS)
        self.at = Millis(now + AGAIN_MS[self.turns]) if left else None
        self.turns += 1


class Links(Protocol):
    """Interface of the mover whose links are probed."""

    config: KVTransferConfig
    metrics: HandoffMetrics
    table: ImportTable
    book: PeerBook

    def transport_to(self, peer: Incarnation) -> Transport: ...

    def slots_to(self, peer: Incarnation) -> SlotMemory: ...

    def welcome_of(self, peer: Incarnation) -> ProducerCard | None: ...

    def send_message(self, peer: Incarnation, message: Message) -> None: ...

    def start_read(self, item: Read, now: Millis, check: Check = ...) -> None:
        """Begin a read, whose end calls ``Prober.read_ended``."""
        ...

    def usable(self, peer: Incarnation, bytes_per_s: float) -> None: ...

    def fall(
        self,
        peer: Incarnation,
        reason: str,
        now: Millis,
        rest_ms: int = 0,
        *,
        may_come: bool = False,
        met: bool = True,
    ) -> None:
        """Report a failed probe: make the link again, by another transport if there is one, else
        after a rest. ``may_come``: a requirement is missing now. ``met``: False if the ends could
        not connect."""
        ...

    def drop(self, peer: Incarnation, reason: str, rest_ms: int = 0) -> None: ...


class Prober:
    """Probes of all links; runs in the transfer thread, on its slots."""

    def __init__(self, mover: Links) -> None:
        self._mover = mover
        self._numbers = itertools.count(1)
        self._probing: dict[Incarnation, _Probing] = {}
        self._unused: dict[Incarnation, _Unused] = {}

    def begin(self, peer: Incarnation, host: str, welcome: ProducerCard, now: Millis) -> None:
        """Connect the transport of a new link and ask P to keep it moving."""
        mover = self._mover
        left = mover.book.quarantine_ms_left(peer, now)
        if left:
            mover.drop(peer, "quarantined", left)
            return
        mover.book.mark(peer, up=False, reason="the link is being probed")
        try:
            mover.transport_to(peer).connect(peer, host, welcome.card)
        except TransportError as error:
            logger.warning("no way to read from %s: %s", host, error)
            mover.fall(peer, str(error), now, may_come=isinstance(error, NotThereYet), met=False)
            return
        self._ask(peer, now, again=False)

    def _ask(self, peer: Incarnation, now: Millis, *, again: bool) -> None:
        number = next(self._numbers)
        until = Millis(now + millis(self._mover.config.kv_connect_seconds))
        self._probing[peer] = _Probing(number, until, again=again)
        self._mover.send_message(peer, Probe(number))

    def used(self, peer: Incarnation) -> None:
        """Stop repeated probes: KV measures the rate from now on."""
        self._unused.pop(peer, None)

    def idle(self, peer: Incarnation, now: Millis) -> None:
        """Probe an idle link again, as its rate is old."""
        if peer in self._mover.table.links and peer not in self._unused:
            self._unused[peer] = unused = _Unused(self._mover.book.probed(peer))
            unused.next(now)

    def ready(self, peer: Incarnation, message: ProbeReady, now: Millis) -> None:
        """Read the pattern: P moves its end."""
        probing = self._probing.get(peer)
        welcome = self._mover.welcome_of(peer)
        if probing is None or probing.number != message.number or welcome is None:
            return
        limit = min(welcome.slot_bytes, self._mover.slots_to(peer).slot_bytes)
        probing.nbytes = max(1, min(message.nbytes, limit))
        self._read(peer, probing, now)

    def work(self, now: Millis) -> list[Action]:
        """Start probes that have a slot now or are due again; fail those whose time is over."""
        for peer, unused in list(self._unused.items()):
            if unused.at is not None and now >= unused.at and peer not in self._probing:
                unused.next(now)
                self._ask(peer, now, again=True)
        for peer, probing in list(self._probing.items()):
            if now > probing.until and probing.again:  # a link that is up may be busy
                self._give_up(peer)
            elif now > probing.until:
                waits = probing.nbytes is not None and probing.slot is None
                self.end(peer)
                if waits:
                    self._mover.drop(peer, NO_SLOT)
                else:
                    self._fail(peer, "the pattern was not read in time", now)
            elif probing.nbytes is not None and probing.slot is None:
                self._read(peer, probing, now)
        return []

    def rest(self, now: Millis) -> float | None:
        if self._probing:
            return 0.1
        due = min((each.at for each in self._unused.values() if each.at is not None), default=None)
        return None if due is None else max(0.0, (due - now) / 1000)

    def read_ended(self, read: Read, done: bool, now: Millis) -> list[Action]:
        mover = self._mover
        probing = self._probing.pop(read.peer, None)
        right = done and self._is_right(read)
        assert read.slot is not None
        actions = mover.table.give_back(read.slot, now)
        if probing is None:
            return actions
        if right:
            seconds = max(time.perf_counter() - probing.started, 1e-6)
            mover.send_message(read.peer, ProbeDone(probing.number, True))
            self._measured(read.peer, read.nbytes / seconds, now, again=probing.again)
        else:
            mover.send_message(read.peer, ProbeDone(probing.number, False))
            fault = "the pattern is wrong" if done else "the pattern could not be read"
            self._fail(read.peer, fault, now)
        return actions

    def _fail(self, peer: Incarnation, reason: str, now: Millis) -> None:
        by_agent = self._mover.transport_to(peer).traits.by_agent
        self._mover.fall(peer, reason, now, may_come=by_agent)

    def _measured(self, peer: Incarnation, bytes_per_s: float, now: Millis, *, again: bool) -> None:
        mover = self._mover
        mover.metrics.probe_rate.observe(bytes_per_s)
        if again:  # the link is in use; KV measures it
            known = self._unused.get(peer)
            if known is not None and bytes_per_s > known.best:
                known.best = bytes_per_s
                mover.book.faster(peer, bytes_per_s)
            return
        self._unused[peer] = unused = _Unused(bytes_per_s)
        unused.next(now)
        mover.usable(peer, bytes_per_s)

    def end(self, peer: Incarnation) -> None:
        """Forget the probes of a lost link; give up a read under way."""
        self._unused.pop(peer, None)
        self._give_up(peer)

    def _give_up(self, peer: Incarnation) -> None:
        probing = self._probing.pop(peer, None)
        if probing is not None and probing.slot is not None:
            self._mover.table.ring.quarantine(probing.slot)

    def _read(self, peer: Incarnation, probing: _Probing, now: Millis) -> None:
        mover, ring = self._mover, self._mover.table.ring
        welcome = mover.welcome_of(peer)
        if welcome is None or probing.nbytes is None:
            return
        if not ring.has_room(peer):
            if probing.again:
                return  # the link is up in any case
            mover.book.mark(peer, up=False, reason=NO_SLOT)
            return
        probing.slot = ring.take(peer, PROBE_KEY, probing.number)
        probing.started = time.perf_counter()
        slot_of_pattern = welcome.num_slots
        read = Read(PROBE_KEY, peer, 0, slot_of_pattern, probing.slot, probing.nbytes)
        mover.start_read(read, now, Check.PATTERN)

    def _is_right(self, read: Read) -> bool:
        assert read.slot is not None
        came = self._mover.slots_to(read.peer).read(read.slot, read.nbytes)
        return came == pattern(read.peer, read.nbytes)
