"""What D's transfer thread stands on, and its links: met, probed, given up, made again."""

from __future__ import annotations

import logging
from collections import Counter

from tandem.kvtransfer.config import millis
from tandem.kvtransfer.control.mail import Drop, LinkNumber, SetPeers
from tandem.kvtransfer.control.peers import PeerBook
from tandem.kvtransfer.events import ConsumerEvent
from tandem.kvtransfer.handoff.actions import Millis, Read
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.kvtransfer.handoff.pull import ConsumerPolicy
from tandem.kvtransfer.handoff.slots import SlotRing
from tandem.kvtransfer.memory.header import HEADER_BYTES
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.ends import Ends
from tandem.kvtransfer.mover.fallen import Fallen, levels_of
from tandem.kvtransfer.mover.falls import Falls
from tandem.kvtransfer.mover.items import ConsumerItem
from tandem.kvtransfer.mover.make_slots import slots_for
from tandem.kvtransfer.mover.mover import Mover, MoverParts
from tandem.kvtransfer.mover.prober import Prober
from tandem.kvtransfer.transports.base import Check, Transport
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)


class LinkedMover(Mover[ConsumerItem, ConsumerEvent]):
    """Owns the import table, the receive slots and what is known of peers."""

    name = "kv-transfer-d"

    def __init__(self, parts: MoverParts) -> None:
        super().__init__(parts)
        config = parts.config
        count = config.kv_receive_slots
        self._slots = slots_for(config, count, parts.slab, parts.transports)
        self.memory, sizes = self._slots.memory, self._slots.sizes
        policy = ConsumerPolicy(
            block_size=parts.layout.block_size,
            groups=parts.groups(sizes),
            header_bytes=HEADER_BYTES,
            credits=sizes.credits,
            transfer_ms=millis(config.kv_transfer_seconds),
            commit_ms=millis(config.kv_commit_seconds),
            tombstone_ms=millis(config.kv_tombstone_seconds),
            wait_ms=millis(config.kv_wait_seconds),
        )
        ring = SlotRing(count, config.kv_slots_per_peer)
        self.table = ImportTable(policy, ring)
        direct, blocks = parts.direct, parts.blocks()
        for name, transport in parts.transports.items():
            slots = self._slots.of(transport.traits)
            transport.receive(slots, blocks if name in direct else None)
        self.book = PeerBook()
        self.prober = Prober(self)
        rest = millis(config.kv_quarantine_seconds)
        self.falls = Falls(rest, tuple(parts.transports), self._links)
        self._given_up: dict[Incarnation, LinkNumber] = {}
        """Links that were dropped and whose ``LinkDown`` has not come."""
        self._welcomes: dict[Incarnation, ProducerCard] = {}
        self._drained: dict[Incarnation, float] = {}
        """Links that stand and get no new hand-offs, and the rates of their probes; one at most."""
        self._times_drained: Counter[Incarnation] = Counter()
        self.ends = Ends(parts, policy)
        self.fallen = Fallen(levels_of(parts.transports), self._links)
        self._observe_fallen()

    def start_read(self, item: Read, now: Millis, check: Check = Check.HEADER) -> None:
        """Post a read, which is polled to its end, wanted or not."""
        raise NotImplementedError

    def transport_to(self, peer: Incarnation) -> Transport:
        """By which the peer is read."""
        return self.parts.transports[self._welcomes[peer].connector]

    def slots_to(self, peer: Incarnation) -> SlotMemory:
        """Those in which what is read of the peer lands."""
        return self._slots.of(self.transport_to(peer).traits)

    def welcome_of(self, peer: Incarnation) -> ProducerCard | None:
        """What the peer said, while its link stands."""
        return self._welcomes.get(peer)

    def usable(self, peer: Incarnation, bytes_per_s: float) -> None:
        """The probe passed, at this rate: hand-offs may start, unless it is given up already."""
        if self._is_given_up(peer):
            return
        self.table.link_up(peer)
        connector = self._welcomes[peer].connector
        said = (peer.hex()[:8], connector, bytes_per_s / 1e9)
        logger.info("KV of %s comes by %s, the probe at %.2f GB/s", *said)
        self.falls.worked(peer, connector)
        self.fallen.usable(peer, connector)
        self._observe_fallen()
        reason = self.ends.fell_for(peer)
        self.book.mark(peer, up=True, reason=reason, transport=connector, probed=bytes_per_s)
        self.parts.notify()
        self.observe()

    def _meet(self, peer: Incarnation, host: str, card: ProducerCard, now: Millis) -> None:
        rest = millis(self.config.kv_quarantine_seconds)
        self.prober.end(peer)  # of another link to this peer
        if (refused := self.ends.why_refused(card)) is not None:
            logger.warning("no link to %s: %s", host, refused)
            self.book.mark(peer, up=False, reason=refused)
            self.drop(peer, refused, rest)
        elif (uncut := self.ends.why_uncut(peer, card)) is not None:
            self.metrics.uncut_links.labels(card.connector).inc()
            self.book.mark(peer, up=False, reason=uncut)
            self.fall(peer, uncut, now, rest, met=False)
        else:
            self.prober.begin(peer, host, card, now)
        self._observe_fallen()

    def _observe_fallen(self) -> None:
        for connector, count in self.fallen.counts().items():
            self.metrics.links_fallen.labels(connector).set(count)

    def _quarantine(self, peer: Incarnation, reason: str, now: Millis) -> None:
        rest = millis(self.config.kv_quarantine_seconds)
        logger.error("data of %s was wrong, the link is quarantined: %s", peer.hex()[:8], reason)
        self.book.quarantine(peer, Millis(now + rest))
        self.drop(peer, f"quarantined: {reason}", rest)

    def _end(self, problem: str) -> None:
        """See Mover; no producer keeps a lease for who reads nothing any more."""
        super()._end(problem)
        if self.control is not None:
            self.control.post(SetPeers(()))

    def drop(self, peer: Incarnation, reason: str, rest_ms: int = 0, again: str = "") -> None:
        """Give the link up; ``LinkDown`` follows. By ``again`` the next may go at once."""
        if (link := self._links.get(peer)) is not None and self.control is not None:
            self._given_up[peer] = link
            self.control.post(Drop(link, reason, rest_ms, again))

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
        """Give the link up as its transport failed: it is made again by the next, if there is
        one, else after ``rest_ms``, or, if that is 0, soon where the two ends had ``met`` by one,
        else when a way may be tried again; ``may_come`` is what is not there yet. Once a link:
        what fails together on it is one incident."""
        welcome, link = self._welcomes.get(peer), self._links.get(peer)
        if self._is_given_up(peer):
            return
        if welcome is None or len(self.parts.transports) < 2:
            self.drop(peer, reason, rest_ms)
        elif link is not None and self.control is not None:
            pause = self.falls.failed(peer, welcome.connector, now, may_come=may_come)
            # Ends that had not met by it, and are not to, miss nothing.
            self.fallen.failed(peer, welcome.connector, met=met or may_come)
            if rest_ms:
                pause = min(pause, rest_ms)
            logger.warning("%s fails for KV of %s: %s", welcome.connector, peer.hex()[:8], reason)
            self._given_up[peer] = link
            self.control.post(Drop(link, reason, rest_ms, welcome.connector, pause, met))

    def _is_given_up(self, peer: Incarnation) -> bool:
        """Whether the end of the link that it has is only to be heard of."""
        link = self._links.get(peer)
        return link is not None and self._given_up.get(peer) == link

    def _come_back(self, now: Millis) -> None:
        """Links whose better way may work again are made anew, when no hand-off is on them."""
        due, busy = dict(self.falls.due(now)), []
        if not due and not self._drained:
            return
        for peer, connector in due.items():
            if not self.table.is_pulling(peer):
                self.falls.tried(peer, now)
                self._drained.pop(peer, None)
                reason = f"trying {connector} again"
                if peer in self.table.links:  # none are let on it before it is made anew
                    self.book.mark(peer, up=False, reason=reason)
                self.drop(peer, reason, again=connector)
            elif peer in self.table.links and self.falls.is_drained(peer, now):
                busy.append(peer)
        for peer in self._drained.keys() - busy:
            self._let_in(peer)
        if busy and not self._drained:  # one at a time: what fails on one way often fails on all
            peer = min(busy, key=self._times_drained.__getitem__)
            self._drain(peer, due[peer])

    def _drain(self, peer: Incarnation, connector: str) -> None:
        """Keep new hand-offs off a link that is due and never idle."""
        self._times_drained[peer] += 1
        self._drained[peer] = self.book.probed(peer)
        reason = f"its hand-offs are to end before {connector} is tried again"
        self.book.mark(peer, up=False, reason=reason)
        self.parts.notify()

    def _let_in(self, peer: Incarnation) -> None:
        """Let hand-offs on it again."""
        probed = self._drained.pop(peer)
        if peer in self.table.links:
            reason, by = self.ends.fell_for(peer), self._welcomes[peer].connector
            self.book.mark(peer, up=True, reason=reason, transport=by, probed=probed)
            self.parts.notify()
