"""D's transfer thread: reads into receive slots, verifies, unpacks, and asks P to commit."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import msgspec

from tandem.kvtransfer.control.mail import FromPeer, LinkDown, LinkUp
from tandem.kvtransfer.events import (
    Cancelled,
    Loaded,
    LoadFailed,
    Ready,
    Released,
)
from tandem.kvtransfer.handoff import messages
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import (
    Action,
    Count,
    EmitEvent,
    Millis,
    QuarantinePeer,
    Read,
    Send,
    Unpack,
)
from tandem.kvtransfer.handoff.messages import Done, Final, ProbeReady
from tandem.kvtransfer.handoff.pull import SlotState
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.metrics import HandoffMetrics
from tandem.kvtransfer.mover.linked import LinkedMover
from tandem.kvtransfer.mover.make_slots import Fault, fault_of_copy, why_not_read
from tandem.kvtransfer.mover.mover import (
    MOVE_NAP_SECONDS,
    ConsumerItem,
    MoverParts,
    Reserved,
    SleepState,
)
from tandem.kvtransfer.mover.prober import PROBE_KEY
from tandem.kvtransfer.mover.reads import Ended, Reads, Unpacks
from tandem.kvtransfer.mover.throughput import Throughput
from tandem.kvtransfer.transports.base import Check, Progress, Sleepable
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.timeline import Note

MAX_PARTS = 48
"""Parts of one hand-off that are noted; further ones only in the total."""

_STRETCHES = (
    ("wait", "open", "ready"),
    ("reserve", "ready", "want"),
    ("load", "want", "loaded"),
    ("commit", "done", "loaded"),
)
"""Notes of a whole hand-off: name, from, to."""


def _outcome(event: Loaded | LoadFailed | Cancelled) -> str:
    if isinstance(event, Loaded):
        return "loaded" if event.usable else "first_token_ended"
    return "failed" if isinstance(event, LoadFailed) else "cancelled"


class Phases:
    """Times of each key's steps, until it ends."""

    def __init__(self, metrics: HandoffMetrics) -> None:
        self._metrics = metrics
        self._at: dict[RequestKey, dict[str, float]] = {}
        self._parts: dict[RequestKey, list[Note]] = {}
        self._seen: list[tuple[str, float]] = []
        """Phases and their seconds that are not counted yet, like the next two."""
        self._moved: list[int] = []
        self._outcomes: Counter[str] = Counter()

    def begin(self, key: RequestKey) -> None:
        self._at[key] = {"open": time.monotonic()}
        self._parts[key] = []

    def read(self, key: RequestKey, nbytes: int, seconds: float) -> None:
        """Record a part that was just read."""
        self._seen.append(("read", seconds))
        self._moved.append(nbytes)
        parts = self._parts.get(key)
        if parts is not None and len(parts) < MAX_PARTS:
            now = time.monotonic()
            parts.append(Note("part", now - seconds, now, nbytes))

    def unpacked(self, seconds: float) -> None:
        self._seen.append(("unpack", seconds))

    def wanted(self, key: RequestKey) -> None:
        """Record that blocks are reserved."""
        self._step(key, "want", "reserve", since="ready")

    def sent(self, message: object) -> None:
        if isinstance(message, Done) and message.ok:
            self._step(message.key, "done")

    def final(self, key: RequestKey) -> None:
        """Record FINAL of P: the prompt is done."""
        self._step(key, "final")

    def note_event(self, event: object) -> object:
        """Record an event for the engine; return the event, with its times if it is ``Loaded``."""
        if isinstance(event, Ready):
            self._step(event.key, "ready", "wait", since="open")
        elif isinstance(event, Loaded) and event.usable:
            self._step(event.key, "loaded", "commit", since="done")
            self._step(event.key, "loaded", "load", since="want")
            self._step(event.key, "loaded", "tail", since="final")
            event = replace(event, notes=self._notes(event.key))
        if isinstance(event, Loaded | LoadFailed | Cancelled):
            self._at.pop(event.key, None)
            self._parts.pop(event.key, None)
            if not event.key.is_pull:  # pulls are counted by their connector
                self._outcomes[_outcome(event)] += 1
        if isinstance(event, LoadFailed) and not event.key.is_pull:
            self._metrics.failures.labels("consumer", event.cause).inc()
        assert not isinstance(event, Released) or event.key not in self._at
        return event

    def settle(self) -> None:
        """Count all that has passed since the last time."""
        for phase, seconds in self._seen:
            self._metrics.phase_of(phase).observe(seconds)
        for nbytes in self._moved:
            self._metrics.moved("consumer", nbytes)
        for outcome, count in self._outcomes.items():
            self._metrics.endings_of("consumer", outcome).inc(count)
        self._seen.clear()
        self._moved.clear()
        self._outcomes.clear()

    def _notes(self, key: RequestKey) -> tuple[Note, ...]:
        at, parts = self._at.get(key, {}), self._parts.get(key, [])
        total = sum(each.amount for each in parts)
        return (
            *(
                Note(name, at[begin], at[end], total if name == "load" else 0)
                for name, begin, end in _STRETCHES
                if begin in at and end in at
            ),
            *parts,
        )

    def _step(self, key: RequestKey, name: str, phase: str = "", since: str = "") -> None:
        at = self._at.get(key)
        if at is None:
            return
        at[name] = time.monotonic()
        if since in at:
            self._seen.append((phase, at[name] - at[since]))


class ConsumerMover(LinkedMover):
    """Transfer thread of D: hand-offs from READY to their endings."""

    def __init__(self, parts: MoverParts) -> None:
        super().__init__(parts)
        self.phases = Phases(parts.metrics)
        self.throughput = Throughput(
            parts.metrics,
            self.book,
            token_bytes=parts.layout.token_bytes,
            slow_seconds=parts.config.kv_slow_seconds,
        )
        self.reads = Reads(parts.transports, parts.layout, parts.shard, parts.notify)
        self._unpacks = Unpacks(parts, self.memory)
        self._hashes: dict[RequestKey, tuple[BlockHash, ...]] = {}
        """Block hashes of hand-offs that are copied, while they are open."""
        self._tags: dict[tuple[RequestKey, int], bytes] = {}
        """Tags of copies that have not been checked, by key and part."""
        found = parts.transports.values()
        self._resting = [each for each in found if isinstance(each, Sleepable)]
        self._asleep = False

    @property
    def resting_bytes(self) -> int:
        """Return the bytes to release while the engine sleeps. Callable from any thread."""
        return sum(each.held_bytes for each in self._resting)

    def take(self, item: ConsumerItem, now: Millis) -> list[Action]:
        if isinstance(item, FromPeer):
            return self._take_message(item, now)
        if isinstance(item, LinkUp):
            assert item.welcome is not None
            self._links[item.peer] = item.link
            self._welcomes[item.peer] = item.welcome
            self.reads.link_up(item.peer)
            self._meet(item.peer, item.host, item.welcome, now)
            return []
        if isinstance(item, LinkDown):
            return self._take_link_down(item, now)
        if isinstance(item, SleepState):
            self._asleep = item.asleep
            return []
        if isinstance(item, d_events.Opened):
            up = item.producer in self.table.links
            direct = up and self._welcomes[item.producer].connector in self.parts.direct
            form = self.ends.form(item.producer) if up else None
            item = msgspec.structs.replace(item, link_up=up, direct=direct, form=form)
            self.phases.begin(item.key)
            self.throughput.begin(item.key)
        if isinstance(item, Reserved):
            pull = self.table.pulls.get(item.key)
            if pull is not None and pull.direct and pull.state is DState.WAITING:
                self._hashes[item.key] = item.hashes
            self.phases.wanted(item.key)
            load = d_events.Load(item.key, item.tables, item.from_token, item.to_token)
            return self.table.apply(load, now)
        return self.table.apply(item, now)

    def _take_message(self, item: FromPeer, now: Millis) -> list[Action]:
        message, peer = item.message, item.peer
        if self._links.get(peer) != item.link:
            return [Count("d:message of an old link")]
        if isinstance(message, ProbeReady):
            self.prober.ready(peer, message, now)
            return []
        if isinstance(message, messages.Ready) and not self.table.is_news(message):
            self.stay_awake()  # repeated as its KV is about to be written
        if isinstance(message, Final):
            self.phases.final(message.key)
            self.throughput.final(message.key)
        return self.table.apply(d_events.PeerMessage(message.key, peer, message), now)  # type: ignore[union-attr, arg-type]

    def _take_link_down(self, item: LinkDown, now: Millis) -> list[Action]:
        peer = item.peer
        if self._links.get(peer) != item.link:
            return []
        del self._links[peer]
        self._given_up.pop(peer, None)
        actions = self.table.link_lost(peer, item.reason, now)
        self.prober.end(peer)
        transport = self.parts.transports.get(self._welcomes.pop(peer).connector)
        if transport is not None:  # else the link was refused for it
            transport.close(peer)
        self.reads.link_lost(peer)
        self.throughput.forget(peer)
        self.ends.forget(peer)
        self.book.mark(peer, up=False, reason=item.reason)
        self._observe_ways()
        self.parts.notify()
        return actions

    # Actions.

    def execute(self, action: Action, now: Millis) -> list[Action]:
        if isinstance(action, Send):
            self.phases.sent(action.message)
            self.send_message(action.to, action.message)
        elif isinstance(action, EmitEvent):
            event = self.phases.note_event(action.event)
            if not isinstance(action.event, Ready):
                self.throughput.end(action.event.key)
                if getattr(action.event, "blocks_free", True):  # else copies are still checked
                    self._hashes.pop(action.event.key, None)
            self.queue_event(event)  # type: ignore[arg-type]
        elif isinstance(action, Read):
            return self._read(action, now)
        elif isinstance(action, Unpack):
            if action.slot is None:  # tags, not bytes
                return self._judge_copy(action, now)
            self._unpacks.add(action)
        elif isinstance(action, QuarantinePeer):
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
        self.reads.start(item, self._welcomes[item.peer], self.slots_to(item.peer), check)
        self.active()

    def work(self, now: Millis) -> list[Action]:
        if self.reads:
            self._carry_out(self._poll_reads(now), now)  # at once: an engine waits for their end
            if self._has_events:
                self._let_go()
            for peer in self.reads.hung(self.config.kv_transfer_seconds):
                self.fall(peer, "a read hangs", now)
        actions: list[Action] = []
        if self._unpacks.waits:
            self._unpacks.begin()
        if self._unpacks.under_way:
            for item, started, fault in self._unpacks.ended():
                actions += self._unpacked(item, started, fault, now)
        for each in self._resting:
            each.look()
            if self._asleep and not self.reads:  # also when a link's probe has woken one
                each.rest()
        for peer in self.throughput.look(self.table.pulls):
            self.prober.idle(peer, now)
        actions += self.prober.work(now)
        self._come_back(now)
        due = self.table.next_deadline()
        if due is not None and due <= now:
            actions += self.table.expire(now)
            self.observe()
        return actions

    # Bytes.

    def _poll_reads(self, now: Millis) -> list[Action]:
        actions: list[Action] = []
        for ended in self.reads.ended():
            read = ended.read
            if ended.progress is Progress.UNKNOWN:
                self.drop(read.peer, "a read is in an unknown state")
                continue
            self.active()
            if ended.tags:
                self._tags[(read.key, read.index)] = ended.tags
            actions += self._read_ended(ended, now)
        return actions

    def _over(
        self, read: Read, now: Millis, fault: FailCause | None = None, message: str = ""
    ) -> list[Action]:
        if read.slot is not None:
            return self.table.read_ended(read.slot, now, fault, message)
        actions = self.table.copy_ended(read.key, read.index, now, fault, message)
        if not any(isinstance(each, Unpack) for each in actions):
            self._tags.pop((read.key, read.index), None)  # not needed any more
        return actions

    def _read_ended(self, ended: Ended, now: Millis) -> list[Action]:
        read, done = ended.read, ended.progress is Progress.DONE
        wanted = True
        if read.slot is not None:
            wanted = self.table.ring[read.slot].state is SlotState.HELD
            if read.key == PROBE_KEY:
                if wanted:
                    return self.prober.read_ended(read, done, now)
                return self.table.give_back(read.slot, now)
        if done:
            self.parts.board.transfers += 1
            seconds = time.perf_counter() - ended.started
            self.phases.read(read.key, read.nbytes, seconds)
            if not ended.late:
                self.throughput.moved(read.peer, read.nbytes, seconds)
                self.prober.used(read.peer)
            return self._over(read, now)
        if read.slot is None:
            pull = self.table.pulls.get(read.key)
            wanted = pull is not None and pull.state is DState.PULLING
        if wanted:  # a fault of the link: only another can do better
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
            self.phases.unpacked(time.perf_counter() - started)
        self.parts.board.transfers += 1
        self.active()
        cause, message = fault or (None, "")
        return self.table.apply(d_events.Unpacked(item.key, item.index, cause, message), now)

    def rest(self, now: Millis) -> float | None:
        if self._unpacks.waits:
            return 0
        naps = [
            MOVE_NAP_SECONDS if self._unpacks.under_way else None,
            self.until(self.table.next_deadline(), now),
            self.prober.rest(now),
            self.throughput.rest(),
            self.ways.rest(now),
        ]
        if self.reads:
            naps.append(self.reads.nap(self.nap))
        return min((each for each in naps if each is not None), default=None)

    def wakers(self) -> list[int]:
        return self.reads.wakers()

    def pause(self, seconds: float | None) -> None:
        """Stay awake while a copy is likely to end, and for messages of peers."""
        if not self.reads.watch(self.serve_sockets):
            super().pause(seconds)

    def still_written(self, settled: bool) -> frozenset[RequestKey]:
        return self.reads.left() | (frozenset() if settled else self._unpacks.written())

    def settle(self) -> None:
        self.phases.settle()

    def observe(self) -> None:
        ring = self.table.ring
        held = len(ring) - ring.free - ring.quarantined
        counts = (("free", ring.free), ("quarantined", ring.quarantined), ("held", held))
        for state, count in counts:
            self.metrics.slots_of("consumer", state).set(count)
        self.metrics.links.labels("consumer").set(len(self.table.links))
