"""D's transfer thread: reads into receive slots, verifies, unpacks, asks P for its word."""

from __future__ import annotations

import logging
import time

import msgspec

from tandem.kvtransfer.config import millis
from tandem.kvtransfer.control.mail import Drop, FromPeer, LinkDown, LinkUp
from tandem.kvtransfer.control.peers import PeerBook
from tandem.kvtransfer.events import ConsumerEvent, Ready
from tandem.kvtransfer.handoff import messages
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import (
    Action,
    Blame,
    Count,
    Millis,
    Read,
    Send,
    Tell,
    Unpack,
)
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.messages import Final, ProbeReady, ProducerCard
from tandem.kvtransfer.handoff.pull import ConsumerPolicy
from tandem.kvtransfer.handoff.slots import SlotRing, SlotState
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.memory.header import HEADER_BYTES
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.cards import why_not_read
from tandem.kvtransfer.mover.ends import Ends
from tandem.kvtransfer.mover.falls import Falls
from tandem.kvtransfer.mover.identity import Fault, fault_of_copy
from tandem.kvtransfer.mover.items import ConsumerItem, Reserved, Rest
from tandem.kvtransfer.mover.make_slots import make_all_slots
from tandem.kvtransfer.mover.mover import MOVE_NAP_SECONDS, Mover, MoverParts
from tandem.kvtransfer.mover.pace import Pace
from tandem.kvtransfer.mover.phases import Phases
from tandem.kvtransfer.mover.prober import PROBE_KEY, Prober
from tandem.kvtransfer.mover.reads import Reads
from tandem.kvtransfer.mover.unpacks import Unpacks
from tandem.kvtransfer.transports.base import Check, Progress, Resting, Transport
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey

logger = logging.getLogger(__name__)


class ConsumerMover(Mover[ConsumerItem, ConsumerEvent]):
    """Owns the import table and the receive slots."""

    name = "kv-transfer-d"

    def __init__(self, parts: MoverParts) -> None:
        super().__init__(parts)
        config, block_bytes = parts.config, parts.layout.block_bytes
        traits = [each.traits for each in parts.transports.values()]
        self._slots = make_all_slots(config, config.kv_receive_slots, parts.slab, traits)
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
        ring = SlotRing(config.kv_receive_slots, config.kv_slots_per_peer)
        self.table = ImportTable(policy, ring)
        direct, blocks = parts.direct, parts.blocks()
        for name, transport in parts.transports.items():
            slots = self._slots.of(transport.traits)
            transport.receive(slots, blocks if name in direct else None)
        self.book = PeerBook()
        self.phases = Phases(parts.metrics)
        self.pace = Pace(
            parts.metrics,
            self.book,
            token_bytes=block_bytes / parts.layout.block_size,
            slow_seconds=config.kv_slow_seconds,
        )
        self.prober = Prober(self)
        self.falls = Falls(millis(config.kv_quarantine_seconds), tuple(parts.transports))
        self._welcomes: dict[Incarnation, ProducerCard] = {}
        self.ends = Ends(parts, policy)
        self.reads = Reads(parts.transports, parts.layout, parts.shard, parts.notify)
        self._unpacks = Unpacks(parts, self.memory)
        self._hashes: dict[RequestKey, tuple[BlockHash, ...]] = {}
        """Of hand-offs that are copied, while they are open."""
        self._tags: dict[tuple[RequestKey, int], bytes] = {}
        """By key and part: of copies that have not been checked."""
        found = parts.transports.values()
        self._resting = [each for each in found if isinstance(each, Resting)]
        self._asleep = False

    # -- links --------------------------------------------------------------------------------

    def transport_to(self, peer: Incarnation) -> Transport:
        """By which the peer is read."""
        return self.parts.transports[self._welcomes[peer].connector]

    def slots_to(self, peer: Incarnation) -> SlotMemory:
        """Those in which what is read of the peer lands."""
        return self._slots.of(self.transport_to(peer).traits)

    @property
    def resting_bytes(self) -> int:
        """Of memory that goes while the engine sleeps; any thread."""
        return sum(each.held_bytes for each in self._resting)

    def welcome_of(self, peer: Incarnation) -> ProducerCard | None:
        """What the peer said, while its link stands."""
        return self._welcomes.get(peer)

    def usable(self, peer: Incarnation, bytes_per_s: float) -> None:
        """The probe passed, at this rate: hand-offs may start."""
        self.table.link_up(peer)
        connector = self._welcomes[peer].connector
        said = (peer.hex()[:8], connector, bytes_per_s / 1e9)
        logger.info("KV of %s comes by %s, the probe at %.2f GB/s", *said)
        self.falls.worked(peer, connector)
        reason = self.ends.fell_for(peer)
        self.book.mark(peer, up=True, reason=reason, transport=connector, probed=bytes_per_s)
        self.parts.notify()
        self.observe()

    def take(self, item: ConsumerItem, now: Millis) -> list[Action]:
        """Engine, peers and links, in the order in which they came."""
        if isinstance(item, FromPeer):
            return self._take_message(item, now)
        if isinstance(item, LinkUp):
            assert item.welcome is not None
            self._links[item.peer] = item.link
            self._welcomes[item.peer] = item.welcome
            self._meet(item.peer, item.host, item.welcome, now)
            return []
        if isinstance(item, LinkDown):
            return self._take_link_down(item, now)
        if isinstance(item, Rest):
            self._asleep = item.asleep
            return []
        if isinstance(item, d_events.Opened):
            up = item.producer in self.table.links
            direct = up and self._welcomes[item.producer].connector in self.parts.direct
            form = self.ends.form(item.producer) if up else None
            item = msgspec.structs.replace(item, link_up=up, direct=direct, form=form)
            self.phases.begin(item.key)
            self.pace.begin(item.key)
        if isinstance(item, Reserved):
            pull = self.table.pulls.get(item.key)
            if pull is not None and pull.direct and pull.state is DState.WAITING:
                self._hashes[item.key] = item.hashes
            self.phases.wanted(item.key)
            tables = (item.block_ids,)
            load = d_events.Load(item.key, tables, item.from_token, item.to_token)
            return self.table.apply(load, now)
        return self.table.apply(item, now)

    def _meet(self, peer: Incarnation, host: str, card: ProducerCard, now: Millis) -> None:
        rest = millis(self.config.kv_quarantine_seconds)
        if (refused := self.ends.why_refused(card)) is not None:
            logger.warning("no link to %s: %s", host, refused)
            self.book.mark(peer, up=False, reason=refused)
            self.drop(peer, refused, rest)
        elif (uncut := self.ends.why_uncut(peer, card)) is not None:
            self.metrics.uncut_links.labels(card.connector).inc()
            self.book.mark(peer, up=False, reason=uncut)
            self.fall(peer, uncut, now, rest)
        else:
            self.prober.begin(peer, host, card, now)

    def _take_message(self, item: FromPeer, now: Millis) -> list[Action]:
        message, peer = item.message, item.peer
        if self._links.get(peer) != item.link:
            return [Count("d:message of an old link")]
        if isinstance(message, ProbeReady):
            self.prober.ready(peer, message, now)
            return []
        if isinstance(message, messages.Ready) and not self.table.is_news(message):
            self.stay_awake()  # said again since its KV is about to be written
        if isinstance(message, Final):
            self.phases.final(message.key)
            self.pace.final(message.key)
        return self.table.apply(d_events.Told(message.key, peer, message), now)  # type: ignore[union-attr, arg-type]

    def _take_link_down(self, item: LinkDown, now: Millis) -> list[Action]:
        peer = item.peer
        if self._links.get(peer) != item.link:
            return []
        del self._links[peer]
        actions = self.table.link_lost(peer, item.reason, now)
        self.prober.end(peer)
        transport = self.parts.transports.get(self._welcomes.pop(peer).connector)
        if transport is not None:  # else the link was refused for it
            transport.close(peer)
        self.pace.forget(peer)
        self.ends.forget(peer)
        self.book.mark(peer, up=False, reason=item.reason)
        self.parts.notify()
        return actions

    # -- actions ------------------------------------------------------------------------------

    def execute(self, action: Action, now: Millis) -> list[Action]:
        """Send, tell and read at once; unpacks wait for their turn, so that messages do not."""
        if isinstance(action, Send):
            self.phases.sent(action.message)
            self.say(action.to, action.message)
        elif isinstance(action, Tell):
            event = self.phases.told(action.event)
            if not isinstance(action.event, Ready):
                self.pace.end(action.event.key)
                if getattr(action.event, "blocks_free", True):  # else copies are still checked
                    self._hashes.pop(action.event.key, None)
            self.tell(event)  # type: ignore[arg-type]
        elif isinstance(action, Read):
            return self._read(action, now)
        elif isinstance(action, Unpack):
            if action.slot is None:  # a look at tags, not at bytes
                return self._judge_copy(action, now)
            self._unpacks.add(action)
        elif isinstance(action, Blame):
            self._quarantine(action.peer, action.reason, now)
        elif isinstance(action, Count):
            self.metrics.stray.labels(action.what).inc()
        return []

    def _read(self, item: Read, now: Millis) -> list[Action]:
        welcome = self._welcomes.get(item.peer)
        if welcome is None:
            return self._over(item, now, FailCause.PEER, "the link is lost")
        if (message := why_not_read(item, welcome)) is not None:
            return self._over(item, now, FailCause.IDENTITY, message)
        self.start_read(item, now)
        return []

    def start_read(self, item: Read, now: Millis, check: Check = Check.HEADER) -> None:
        """Post a read; ``work`` polls it to its end, wanted or not."""
        self.reads.start(item, self._welcomes[item.peer], self.slots_to(item.peer), check)
        self.active()

    def work(self, now: Millis) -> list[Action]:
        """Reads, parts that are unpacked and one more, probes, deadlines."""
        if self.reads:
            self._carry_out(self._poll_reads(now), now)  # at once: an engine waits for their end
        actions: list[Action] = []
        if self._unpacks.waits:
            self._unpacks.begin()
        if self._unpacks.under_way:
            for item, started, fault in self._unpacks.ended():
                actions += self._unpacked(item, started, fault, now)
        if self._asleep and not self.reads:  # also when a link's probe has woken one
            for each in self._resting:
                each.rest()
        self.pace.look(self.table.pulls)
        actions += self.prober.work(now)
        self._come_back(now)
        due = self.table.next_deadline()
        if due is not None and due <= now:
            actions += self.table.expire(now)
        return actions

    # -- bytes --------------------------------------------------------------------------------

    def _poll_reads(self, now: Millis) -> list[Action]:
        actions: list[Action] = []
        for read, progress, started, tags in self.reads.ended():
            if progress is Progress.UNKNOWN:
                self.drop(read.peer, "a read is in an unknown state")
                continue
            self.active()
            if tags:
                self._tags[(read.key, read.index)] = tags
            actions += self._read_ended(read, progress is Progress.DONE, started, now)
        return actions

    def _over(
        self, read: Read, now: Millis, fault: FailCause | None = None, message: str = ""
    ) -> list[Action]:
        """A read is terminal: what follows."""
        if read.slot is not None:
            return self.table.read_ended(read.slot, now, fault, message)
        actions = self.table.copy_ended(read.key, read.index, now, fault, message)
        if not any(isinstance(each, Unpack) for each in actions):
            self._tags.pop((read.key, read.index), None)  # nobody checks what nobody wants
        return actions

    def _read_ended(self, read: Read, done: bool, started: float, now: Millis) -> list[Action]:
        wanted = True
        if read.slot is not None:
            held = self.table.ring[read.slot]
            wanted = held.state is SlotState.HELD
            if wanted and held.key == PROBE_KEY:
                return self.prober.read_ended(read, done, now)
        if done:
            self.parts.board.transfers += 1
            seconds = time.perf_counter() - started
            self.phases.read(read.key, read.nbytes, seconds)
            self.pace.moved(read.peer, read.nbytes, seconds)
            self.prober.used(read.peer)
            self.metrics.moved("consumer", read.nbytes)
            return self._over(read, now)
        if read.slot is None:
            pull = self.table.pulls.get(read.key)
            wanted = pull is not None and pull.state is DState.PULLING
        if wanted:  # of the link that stands: only another can do better
            self.fall(read.peer, "a read failed", now)
        return self._over(read, now, FailCause.PEER, "a read failed")

    def _judge_copy(self, item: Unpack, now: Millis) -> list[Action]:
        started = time.perf_counter()
        seen, hashes = self._tags.pop((item.key, item.index)), self._hashes.get(item.key, ())
        size = (item.form or self.table.policy).block_size
        return self._unpacked(item, started, fault_of_copy(item, seen, hashes, size), now)

    def _unpacked(
        self, item: Unpack, started: float, fault: Fault | None, now: Millis
    ) -> list[Action]:
        if fault is None:
            self.metrics.phase_of("unpack").observe(time.perf_counter() - started)
        self.parts.board.transfers += 1
        self.active()
        cause, message = fault or (None, "")
        return self.table.apply(d_events.Unpacked(item.key, item.index, cause, message), now)

    def _quarantine(self, peer: Incarnation, reason: str, now: Millis) -> None:
        rest = millis(self.config.kv_quarantine_seconds)
        logger.error("data of %s was wrong, the link is quarantined: %s", peer.hex()[:8], reason)
        self.book.quarantine(peer, Millis(now + rest))
        self.drop(peer, f"quarantined: {reason}", rest)

    def drop(self, peer: Incarnation, reason: str, rest_ms: int = 0, again: str = "") -> None:
        """Give the link up; ``LinkDown`` follows. By ``again`` the next may go at once."""
        if (link := self._links.get(peer)) is not None and self.control is not None:
            self.control.post(Drop(link, reason, rest_ms, again))

    def fall(
        self,
        peer: Incarnation,
        reason: str,
        now: Millis,
        rest_ms: int = 0,
        *,
        may_come: bool = False,
    ) -> None:
        """Give the link up as its transport failed: it is made again by the next, if there is
        one, else after ``rest_ms``; ``may_come`` is what is not there yet."""
        welcome, link = self._welcomes.get(peer), self._links.get(peer)
        if welcome is None or len(self.parts.transports) < 2:
            self.drop(peer, reason, rest_ms)
        elif link is not None and self.control is not None:
            pause = self.falls.failed(peer, welcome.connector, now, may_come=may_come)
            logger.warning("%s fails for KV of %s: %s", welcome.connector, peer.hex()[:8], reason)
            self.control.post(Drop(link, reason, 0, welcome.connector, pause))

    def _come_back(self, now: Millis) -> None:
        """Links whose better way may work again are made anew, when no hand-off is on them."""
        for peer, connector in self.falls.due(now):
            ended, pulls = (DState.CLOSED, DState.FAILING), self.table.pulls.values()
            if not any(each.producer == peer and each.state not in ended for each in pulls):
                self.falls.tried(peer)
                self.drop(peer, f"trying {connector} again", again=connector)

    def rest(self, now: Millis) -> float | None:
        """Until the next deadline, unless a read or an unpack is to be moved."""
        if self._unpacks.waits:
            return 0
        naps = [
            MOVE_NAP_SECONDS if self._unpacks.under_way else None,
            self.until(self.table.next_deadline(), now),
            self.prober.rest(now),
            self.pace.rest(),
            self.falls.rest(now),
        ]
        if self.reads:
            naps.append(self.reads.nap(self.nap))
        return min((each for each in naps if each is not None), default=None)

    def wakers(self) -> list[int]:
        """Sockets with answers under way, if every read has one."""
        return self.reads.wakers()

    def pause(self, seconds: float | None) -> None:
        """See Mover; awake while a copy is likely to end, and for what peers say meanwhile."""
        if not self.reads.watch(self.hears):
            super().pause(seconds)

    def observe(self) -> None:
        """Slots and links."""
        ring = self.table.ring
        held = len(ring) - ring.free - ring.quarantined
        counts = (("free", ring.free), ("quarantined", ring.quarantined), ("held", held))
        for state, count in counts:
            self.metrics.slots_of("consumer", state).set(count)
        self.metrics.links.labels("consumer").set(len(self.table.links))
