"""Parts of the checked world: names, policies, its set-up, and tables held to their rules."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tests.kvtransfer.model.blocks import WINDOW, Home, Lending

from tandem.kvtransfer.handoff import export as p_events
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import Action, Millis, Read
from tandem.kvtransfer.handoff.export import ProducerPolicy
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.manifest import Group
from tandem.kvtransfer.handoff.messages import Message, ProducerCard
from tandem.kvtransfer.handoff.pull import ConsumerPolicy, SlotRing
from tandem.kvtransfer.handoff.tables import CONSUMER, PRODUCER
from tandem.kvtransfer.memory.blocks import BlockTags
from tandem.kvtransfer.transports.agent.landing import Landing
from tandem.link.liveness import LinkTimes
from tandem.link.session import Session, Terms
from tandem.protocol.card import KVKind
from tandem.protocol.ids import NO_INCARNATION, Incarnation, RequestKey
from tandem.protocol.kv import FirstToken
from tandem.protocol.link import Header
from tandem.protocol.messages import Welcome

NOW = Millis(0)
BLOCK = 1
JUNK = "junk"
ROUTER = b"r" * 16
KEYS = tuple(RequestKey(ROUTER, name, 0) for name in "ab")
P_ADDRESS = tuple(Incarnation(f"producer-{n:07d}".encode()) for n in range(4))
D_ADDRESS = tuple(Incarnation(f"consumer-{n:07d}".encode()) for n in range(4))


@lru_cache
def _groups(kinds: tuple[KVKind, ...], size: int) -> tuple[Group, ...]:
    spans = {KVKind.WINDOW: WINDOW + 1}
    return tuple(
        Group(
            kind=kind,
            span=spans.get(kind),
            block_bytes=1 if kind is KVKind.STATE else size,
            blocks_per_part=1,
            blocks_per_copy=1,
            part_bytes=1,
        )
        for kind in kinds
    )


@lru_cache
def p_policy(kinds: tuple[KVKind, ...], size: int = BLOCK) -> ProducerPolicy:
    """P's, for groups of these kinds, whose blocks have so many tokens."""
    return ProducerPolicy(
        block_size=size,
        groups=_groups(kinds, size),
        header_bytes=0,
        lease_ms=10,
        expect_ms=20,
        tombstone_ms=30,
        wait_ms=40,
    )


@lru_cache
def d_policy(kinds: tuple[KVKind, ...], size: int = BLOCK) -> ConsumerPolicy:
    """D's, for groups of these kinds, whose blocks have so many tokens."""
    return ConsumerPolicy(
        block_size=size,
        groups=_groups(kinds, size),
        header_bytes=0,
        credits=2,
        transfer_ms=10,
        commit_ms=5,
        tombstone_ms=30,
        wait_ms=40,
    )


WELCOME: Welcome[ProducerCard] = Welcome(ProducerCard("memory", b"", 1, 1, 1))
TERMS = {
    me: Terms(me, "hand-off", 1, LinkTimes(), fingerprint="print")
    for me in (*P_ADDRESS, *D_ADDRESS)
}
HELLO = TERMS[D_ADDRESS[0]].hello(("memory",))
TOKEN = (FirstToken(0, 7),)


class Broken(AssertionError):
    """A promise of the protocol was broken."""


TAKEN: set[tuple[object, object]] = set()
"""Pairs of state and event that were walked through in this process."""


class CheckedExports(ExportTable):
    """The running table, each step held to the table of rules."""

    def _step(self, event: p_events.Event, now: Millis) -> list[Action]:
        was = self.exports.get(event.key)
        actions = super()._step(event, now)
        after = self.exports.get(event.key)
        TAKEN.add((None if was is None else was.state, event.kind))
        if after is was:
            return actions
        rule = PRODUCER.get((None if was is None else was.state, event.kind))
        if rule is not None and (None if after is None else after.state) not in rule.next:
            raise Broken(f"P: {was and was.state} × {event.kind} → {after} is not in the table")
        return actions


class CheckedImports(ImportTable):
    """The running table, each step held to the table of rules."""

    def _step(self, event: d_events.Event, now: Millis) -> list[Action]:
        was = self.pulls.get(event.key)
        actions = super()._step(event, now)
        after = self.pulls.get(event.key)
        TAKEN.add((None if was is None else was.state, event.kind))
        if after is was:
            return actions
        rule = CONSUMER.get((None if was is None else was.state, event.kind))
        if rule is not None and (None if after is None else after.state) not in rule.next:
            raise Broken(f"D: {was and was.state} × {event.kind} → {after} is not in the table")
        return actions


class Setup(NamedTuple):
    """What a world is made of; a mutation replaces one of the classes."""

    num_keys: int = 1
    num_blocks: int = 2
    """Tokens of every prompt: chunks, parts and, but for what follows, blocks."""
    p_block: int = BLOCK
    """Tokens of a block of P's; contents are of tokens, whatever the blocks."""
    d_block: int = BLOCK
    """Tokens of a block of D's."""
    send_slots: int = 2
    receive_slots: int = 2
    hit: int = 0
    """Blocks of the prompt that D has already."""
    finish: str | None = None
    """Set: token 1 ends the request."""
    faults: tuple[str, ...] = ()
    """Transitions that count against the budget of faults."""
    exports: type[ExportTable] = CheckedExports
    imports: type[ImportTable] = CheckedImports
    ring: type[SlotRing] = SlotRing
    session: type[Session] = Session
    closed_ears: bool = True
    """Frames on a connection without a session are answered RESET (False: a mutation)."""
    strict_slots: bool = True
    """A read that ends in a slot that is not its own is a broken promise by itself."""
    brisk: bool = False
    """P's engine does all its work on a key at once: fewer states, for wider worlds."""
    p_len: int | None = None
    """Tokens that P can hold of one sequence (a block is a token); None is plenty."""
    d_len: int | None = None
    asked: int | None = None
    """``max_model_len`` of the request; None (a mutation): each end goes by its own."""
    false_end: bool = False
    """P is of another build: D does not agree that ``finish`` is an end."""
    hasty: bool = False
    """D frees the blocks of a false end though they are still written (a mutation)."""
    deaf: bool = False
    """A cancel of what P's engine no longer has ends there (a mutation)."""
    kinds: tuple[KVKind, ...] = (KVKind.FULL,)
    """Groups of the layout, each with an item in the manifest."""
    direct: bool = False
    """P's blocks are copied into D's, without slots."""
    home: Home = Home.OWN
    """Which of P's blocks keys have."""
    tags: type[BlockTags] = BlockTags
    heads: bool = False
    """Slots have headers, which D compares (False: the protocol alone keeps junk away)."""
    turns: bool = True
    """D compares the turns of tags before and behind a copy (False: a mutation)."""
    compares: bool = True
    """D compares the tags of what it copied (False: a mutation)."""
    agent: bool = False
    """An agent copies (``direct``), into landing slots, and D from there into blocks."""
    landing: type[Landing] = Landing
    new_slots: bool = True
    """Landing slots are new memory for each agent (False: a mutation)."""
    hasty_tags: bool = False
    """Tags are read before the bytes are (a mutation)."""
    lends: Lending | None = None
    """D pulls what P has cached: P's engine computes nothing for it."""


class Work(NamedTuple):
    step: int = 0
    """0 before admission; then chunks launched + 1."""
    fenced: int = 0
    first: bool = False
    done: bool = False
    released: bool = False
    asked: bool = False
    """Of a world that lends: D's question is with the engine."""
    wrote: bool = False
    """Of a world that lends: the step that writes the key's blocks is through."""
    evicted: bool = False
    """Of a world that lends: the key's blocks are not cached any more."""


class Use(NamedTuple):
    opened: bool = False
    producer: Incarnation = NO_INCARNATION
    ready: bool = False
    loading: bool = False
    ended: str = ""
    blocks_free: bool = True


class Frame(NamedTuple):
    header: Header
    message: Message
    sign: int
    """Of 64 bits, equal for frames that are."""

    @classmethod
    def of(cls, header: Header, message: Message) -> Frame:
        numbers = (header.source, header.destination, header.sequence)
        return cls(header, message, hash((*numbers, message)))


class InFlight(NamedTuple):
    """A read that is not terminal: of a slot, or (without slots) of blocks, whose bytes land first
    and whose tags are read at the end."""

    slot: int | None
    remote_slot: int | None
    key: RequestKey
    peer: Incarnation
    part: int
    block_ids: tuple[int, ...] = ()
    remote_blocks: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0
    """Tokens, of a copy."""
    group: int = 0
    landed: bool = False
    seen: tuple[bytes, ...] | None = None
    """Tags that were read already (of a mutation)."""
    stale: bool = False
    """A tag of its blocks has changed since it began."""
    landing: int | None = None
    """Landing slot, of a copy that the agent makes."""
    ghost: bool = False
    """Begun by an agent that is gone: it may land, and nobody hears of it."""

    @classmethod
    def of(cls, read: Read, seen: tuple[bytes, ...] | None) -> InFlight:
        """One that begins, as D's table asks for it."""
        between = (read.slot, read.remote_slot, read.key, read.peer, read.index)
        tokens = (read.start, read.stop) if read.slot is None else (0, 0)
        blocks = read.block_ids, read.remote_blocks
        return cls(*between, *blocks, *tokens, read.group, seen=seen)
