"""Base of D's transfer thread, and its links: made, probed, given up, made again."""

from __future__ import annotations

import logging

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
from tandem.kvtransfer.mover.items import ConsumerItem
from tandem.kvtransfer.mover.make_slots import slots_for
from tandem.kvtransfer.mover.mover import Mover, MoverParts
from tandem.kvtransfer.mover.prober import Prober
from tandem.kvtransfer.mover.ways import Ways
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
        self.ways = Ways(rest, parts.transports, self._links)
        self._given_up: dict[Incarnation, LinkNumber] = {}
        """Links that were dropped and whose ``LinkDown`` has not come."""
        self._welcomes: dict[Incarnation, ProducerCard] = {}
        self.ends = Ends(parts, policy)
        self._observe_ways()

    def start_read(self, item: Read, now: Millis, check: Check = Check.HEADER) -> None:
        """Post a read, which is polled to its end, wanted or not."""
        raise NotImplementedError

    def transport_to(self, peer: Incarnation) -> Transport:
        """Return the transport by which the peer is read."""
        return self.parts.transports[self._welcomes[peer].connector]

    def slots_to(self, peer: Incarnation) -> SlotMemory:
        """Return the slots into which the peer is read."""
        return self._slots.of(self.transport_to(peer).traits)

    def welcome_of(self, peer: Incarnation) -> ProducerCard | None:
        """Return the peer's WELCOME while its link is up."""
        return self._welcomes.get(peer)

    def usable(self, peer: Incarnation, bytes_per_s: float) -> None:
        """Let hand-offs start after a probe with this rate, unless the link is given up already."""
        if self._is_given_up(peer):
            return
        self.table.link_up(peer)
        connector = self._welcomes[peer].connector
        said = (peer.hex()[:8], connector, bytes_per_s / 1e9)
        logger.info("KV of %s comes by %s, the probe at %.2f GB/s", *said)
        self.ways.worked(peer, connector)
        self._observe_ways()
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
        self._observe_ways()

    def _observe_ways(self) -> None:
        for connector, count in self.ways.counts().items():
            self.metrics.links_fallen.labels(connector).set(count)

    def _quarantine(self, peer: Incarnation, reason: str, now: Millis) -> None:
        rest = millis(self.config.kv_quarantine_seconds)
        logger.error("data of %s was wrong, the link is quarantined: %s", peer.hex()[:8], reason)
        self.book.quarantine(peer, Millis(now + rest))
        self.drop(peer, f"quarantined: {reason}", rest)

    def _end(self, problem: str) -> None:
        """See Mover; the links end, so that producers keep no lease for this worker."""
        super()._end(problem)
        if self.control is not None:
            self.control.post(SetPeers(()))

    def drop(
        self,
        peer: Incarnation,
        reason: str,
        rest_ms: int = 0,
        *,
        without: str = "",
        without_ms: int = 0,
    ) -> None:
        """Give the link up; ``LinkDown`` follows. The next is made after ``rest_ms``, or, if a way
        is named, soon and ``without`` it for so long."""
        if (link := self._links.get(peer)) is not None and self.control is not None:
            self._given_up[peer] = link
            self.control.post(Drop(link, reason, rest_ms, without, without_ms))

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
        """Give the link up because its transport failed. It is made again without it, unless it is
        the last one; then by it, after ``rest_ms``. ``may_come``: what it needs is not there yet;
        ``met``: the two ends had connected by it. What fails together on a link counts once."""
        welcome = self._welcomes.get(peer)
        if self._is_given_up(peer):
            return
        if welcome is None or welcome.connector == next(reversed(self.parts.transports)):
            self.drop(peer, reason, rest_ms)
            return
        connector = welcome.connector
        logger.warning("%s fails for KV of %s: %s", connector, peer.hex()[:8], reason)
        pause = self.ways.failed(peer, connector, now, met=met, may_come=may_come)
        pause = min(pause, rest_ms) if rest_ms else pause
        self.drop(peer, reason, without=connector, without_ms=pause)

    def _is_given_up(self, peer: Incarnation) -> bool:
        """Return whether the current link was given up and only its ``LinkDown`` is missing."""
        link = self._links.get(peer)
        return link is not None and self._given_up.get(peer) == link

    def _come_back(self, now: Millis) -> None:
        """Make links again whose better way is due, if they are up and no hand-off is on them."""
        for peer, connector in self.ways.due(now):
            if peer not in self.table.links or self.table.is_pulling(peer):
                continue
            self.ways.tried(peer, now)
            reason = f"trying {connector} again"
            self.book.mark(peer, up=False, reason=reason)  # no hand-off may begin on it
            self.drop(peer, reason, without=connector)
