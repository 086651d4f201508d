"""Base of D's transfer thread, and its links: made, probed, given up, made again."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.kvtransfer.config import millis
from tandem.kvtransfer.control.client import MAX_REMEMBERED, PeerBook
from tandem.kvtransfer.control.mail import Drop, LinkNumber, SetPeers
from tandem.kvtransfer.events import ConsumerEvent
from tandem.kvtransfer.handoff.actions import Millis, Read
from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.kvtransfer.handoff.pull import ConsumerPolicy, SlotRing
from tandem.kvtransfer.memory.packing import HEADER_BYTES
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.make_slots import form_with, slots_for, why_refused
from tandem.kvtransfer.mover.mover import ConsumerItem, Mover, MoverParts
from tandem.kvtransfer.mover.prober import Prober
from tandem.kvtransfer.transports.base import Check, Transport
from tandem.protocol.ids import Incarnation


class Ends:
    """Forms of links, for the transfer thread; ``block_size`` is for any thread."""

    def __init__(self, parts: MoverParts, policy: ConsumerPolicy) -> None:
        self._parts = parts
        self._policy = policy
        self._forms: dict[Incarnation, Form | None] = {}
        self._block_sizes: dict[Incarnation, int] = {}
        self._uncut: dict[Incarnation, str] = {}

    def why_refused(self, card: ProducerCard) -> str | None:
        """Return why there is no link to this end, or None."""
        return why_refused(card, self._parts)

    def why_uncut(self, peer: Incarnation, card: ProducerCard) -> str | None:
        """Record the link's form and return None, or return why the card's transport cannot bring
        KV."""
        form = form_with(card, self._parts, self._policy)
        if isinstance(form, str):
            self._uncut[peer] = f"not by {card.connector}: {form}"
            return self._uncut[peer]
        self._forms[peer] = form
        self._block_sizes[peer] = card.block_size
        return None

    def fell_for(self, peer: Incarnation) -> str:
        """Return why a better transport cannot copy the peer's blocks; empty if none was tried."""
        return self._uncut.get(peer, "")

    def form(self, peer: Incarnation) -> Form | None:
        return self._forms[peer]

    def block_size(self, peer: Incarnation) -> int | None:
        """Return the tokens of a block of the peer's; None if it was never linked."""
        return self._block_sizes.get(peer)

    def forget(self, peer: Incarnation) -> None:
        """Forget a lost link; the block sizes of peers that are gone longest are dropped."""
        self._forms.pop(peer, None)
        _shorten(self._block_sizes, self._forms)
        _shorten(self._uncut, self._forms)


def _shorten(known: dict[Incarnation, Any], linked: Container[Incarnation]) -> None:
    gone = [each for each in known if each not in linked]
    for each in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
        del known[each]


MAX_REMEMBERED_WAYS = 256
"""Peers without a link that are remembered; the longest unchanged are forgotten first."""
MAX_DOUBLINGS = 5


@dataclass(slots=True)
class _Known:
    level: int | None = None
    """Level of the best way that passed its probe."""
    missed: str | None = None
    """Best way that failed and has not worked since."""
    again: str | None = None
    """Best way that worked or may come, to return to."""
    failures: int = 0
    due: Millis | None = None
    """Time of the next try of ``again``; None while it is in use."""


class Ways:
    """Transports of each peer's links, for D's transfer thread."""

    def __init__(
        self, pause_ms: int, transports: Mapping[str, Transport], linked: Container[Incarnation]
    ) -> None:
        """``transports`` are named best first; peers in ``linked`` (which changes) are not
        forgotten."""
        self._pause_ms, self._linked = pause_ms, linked
        self._rank = {name: at for at, name in enumerate(transports)}
        self._level = {
            name: 0 if each.traits.maps_memory else self._rank[name]
            for name, each in transports.items()
        }
        self._peers: dict[Incarnation, _Known] = {}

    def worked(self, peer: Incarnation, way: str) -> None:
        known, level = self._of(peer), self._level[way]
        known.level = level if known.level is None else min(level, known.level)
        if known.missed is not None and level <= self._level[known.missed]:
            known.missed = None
        if self._is_best(way, known.again):
            known.again, known.failures, known.due = way, 0, None

    def failed(self, peer: Incarnation, way: str, now: Millis, *, met: bool, may_come: bool) -> int:
        """Return for how many milliseconds the way is not offered. ``met``: the ends had connected
        by it. ``may_come``: a requirement is missing now, so it is tried again in any case."""
        known, level = self._of(peer), self._level[way]
        had_met = known.level is not None and known.level <= level
        is_best = known.missed is None or level <= self._level[known.missed]
        if is_best and (met or may_come or had_met):
            known.missed = way
        if may_come and known.again != way and self._is_best(way, known.again):
            known.again, known.failures = way, 0
        if known.again != way:
            return self._pause_ms
        known.failures += 1
        known.due = Millis(now + self._pause_of(known))
        return self._pause_of(known)

    def due(self, now: Millis) -> list[tuple[Incarnation, str]]:
        """Return the linked peers whose pause is over, each with the way to try."""
        return [(peer, way) for peer, way, due in self._waiting() if due <= now]

    def tried(self, peer: Incarnation, now: Millis) -> None:
        """Record that the link is made again by the better way; the next try is after a pause."""
        known = self._peers[peer]
        known.due = Millis(now + self._pause_of(known))

    def rest(self, now: Millis) -> float | None:
        """Return seconds until a way is due, at least a tenth, as links in use are asked again."""
        first = min((due for _, _, due in self._waiting()), default=None)
        return None if first is None else max(0.1, (first - now) / 1000)

    def counts(self) -> dict[str, int]:
        """Return the number of links that use a worse way, by the better way that failed."""
        worst = max(self._level.values())
        found = {name: 0 for name, level in self._level.items() if level < worst}
        for peer, known in self._peers.items():
            if known.missed in found and peer in self._linked:
                found[known.missed] += 1
        return found

    def _waiting(self) -> Iterator[tuple[Incarnation, str, Millis]]:
        for peer, each in self._peers.items():
            if each.again is not None and each.due is not None and peer in self._linked:
                yield peer, each.again, each.due

    def _is_best(self, way: str, other: str | None) -> bool:
        return other is None or self._rank[way] <= self._rank[other]

    def _pause_of(self, known: _Known) -> int:
        return self._pause_ms << min(max(0, known.failures - 1), MAX_DOUBLINGS)

    def _of(self, peer: Incarnation) -> _Known:
        known = self._peers[peer] = self._peers.pop(peer, _Known())
        gone = [each for each in self._peers if each not in self._linked]
        for each in gone[: max(0, len(gone) - MAX_REMEMBERED_WAYS)]:
            del self._peers[each]
        return known


logger = logging.getLogger(__name__)


class LinkedMover(Mover[ConsumerItem, ConsumerEvent]):
    """Owner of the import table, the receive slots and the state of peers."""

    name = "kv-transfer-d"

    def __init__(self, parts: MoverParts) -> None:
        super().__init__(parts)
        config = parts.config
        count = config.kv_slots
        self._slots = slots_for(config, count, parts.kv_cache, parts.transports)
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
        raise NotImplementedError

    def transport_to(self, peer: Incarnation) -> Transport:
        return self.parts.transports[self._welcomes[peer].connector]

    def slots_to(self, peer: Incarnation) -> SlotMemory:
        return self._slots.of(self.transport_to(peer).traits)

    def welcome_of(self, peer: Incarnation) -> ProducerCard | None:
        return self._welcomes.get(peer)

    def usable(self, peer: Incarnation, bytes_per_s: float) -> None:
        """Let hand-offs start after a probe with this rate, unless the link is given up already."""
        if self._is_given_up(peer):
            return
        self.table.link_up(peer)
        connector = self._welcomes[peer].connector
        values = (peer.hex()[:8], connector, bytes_per_s / 1e9)
        logger.info("KV of %s comes by %s, the probe at %.2f GB/s", *values)
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
        """Close the link; ``LinkDown`` follows. The next is made after ``rest_ms``, or soon and
        ``without`` a way for ``without_ms``."""
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
        """Close the link because its transport failed, and make it again without it, or if it is
        the last, with it after ``rest_ms``. ``may_come``: a requirement is missing now; ``met``:
        the ends had connected. Failures of a link at one time count once."""
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
        link = self._links.get(peer)
        return link is not None and self._given_up.get(peer) == link

    def _come_back(self, now: Millis) -> None:
        for peer, connector in self.ways.due(now):
            if peer not in self.table.links or self.table.is_pulling(peer):
                continue
            self.ways.tried(peer, now)
            reason = f"trying {connector} again"
            self.book.mark(peer, up=False, reason=reason)  # no hand-off may begin on it
            self.drop(peer, reason, without=connector)
