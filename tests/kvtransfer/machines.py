"""P's and D's tables face to face over virtual time, without threads, sockets or bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import pull as d
from tandem.kvtransfer.handoff.actions import (
    Action,
    Count,
    EmitEvent,
    Millis,
    Pack,
    QuarantinePeer,
    Read,
    Send,
    Tag,
    Unpack,
    Untag,
)
from tandem.kvtransfer.handoff.export import ProducerPolicy
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.manifest import Group, manifest
from tandem.kvtransfer.handoff.messages import Ready
from tandem.kvtransfer.handoff.pull import ConsumerPolicy, SlotRing
from tandem.protocol.card import blocks_for
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.kv import FirstToken

BLOCK = 4
P_INC, D_INC = Incarnation(b"P" * 16), Incarnation(b"D" * 16)
LEASE_MS, EXPECT_MS, TOMBSTONE_MS, WAIT_MS = 30_000, 20_000, 60_000, 600_000
TRANSFER_MS, COMMIT_MS = 10_000, 5_000
TOKEN = (FirstToken(0, 42),)

GROUP = Group(block_bytes=100, blocks_per_part=2, blocks_per_copy=2)

P_POLICY = ProducerPolicy(
    block_size=BLOCK,
    groups=(GROUP,),
    header_bytes=10,
    lease_ms=LEASE_MS,
    expect_ms=EXPECT_MS,
    tombstone_ms=TOMBSTONE_MS,
    wait_ms=WAIT_MS,
)
D_POLICY = ConsumerPolicy(
    block_size=BLOCK,
    groups=(GROUP,),
    header_bytes=10,
    credits=2,
    transfer_ms=TRANSFER_MS,
    commit_ms=COMMIT_MS,
    tombstone_ms=TOMBSTONE_MS,
    wait_ms=WAIT_MS,
)


def make_key(name: str = "a") -> RequestKey:
    return RequestKey(b"R" * 16, name, 0)


def ready(key: RequestKey, upto: int, num_tokens: int, *, direct: bool = False) -> Ready:
    """READY with the manifest that fits, and blocks where they are copied."""
    items = manifest((GROUP,), num_tokens)
    return Ready(key, upto, num_tokens, items, named(upto, num_tokens) if direct else ())


def named(upto: int, num_tokens: int) -> tuple[tuple[int, ...]]:
    """The blocks that P names of so many tokens: whole ones until the last."""
    count = blocks_for(upto, BLOCK) if upto == num_tokens else upto // BLOCK
    return (tuple(range(count)),)


A = make_key("a")


class Face:
    """Both tables. Messages wait in ``to_p`` and ``to_d`` until ``flow`` or ``deliver_*``."""

    direct = False
    """P's blocks are copied into D's; else parts go by slots."""

    def __init__(
        self,
        *,
        send_slots: int = 4,
        receive_slots: int = 4,
        per_peer: int = 4,
        direct: bool | None = None,
    ) -> None:
        self.direct = self.direct if direct is None else direct
        self.exports = ExportTable(P_POLICY, SlotRing(send_slots, per_peer))
        self.imports = ImportTable(D_POLICY, SlotRing(receive_slots, per_peer))
        self.exports.link_up(D_INC)
        self.imports.link_up(P_INC)
        self.now = Millis(0)
        self.tags: list[Tag | Untag] = []
        self.to_p: list[Any] = []
        self.to_d: list[Any] = []
        self.packs: list[Pack] = []
        self.reads: list[Read] = []
        self.unpacks: list[Unpack] = []
        self.blamed: list[QuarantinePeer] = []
        self.p_told: list[Any] = []
        self.d_told: list[Any] = []
        self.counted: list[str] = []

    def p(self, event: p.Event) -> None:
        if isinstance(event, p.Admit):
            event = msgspec.structs.replace(event, direct=self.direct)
        self._carry_out(self.exports.apply(event, self.now), self.to_d, self.p_told)

    def d(self, event: d.Event) -> None:
        if isinstance(event, d.Opened):
            event = msgspec.structs.replace(event, direct=self.direct)
        self._carry_out(self.imports.apply(event, self.now), self.to_p, self.d_told)

    def _carry_out(self, actions: list[Action], messages: list[Any], told: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                messages.append(action.message)
            elif isinstance(action, EmitEvent):
                told.append(action.event)
            elif isinstance(action, Count):
                self.counted.append(action.what)
            else:
                kinds = {
                    Pack: self.packs,
                    Read: self.reads,
                    Unpack: self.unpacks,
                    QuarantinePeer: self.blamed,
                    Tag: self.tags,
                    Untag: self.tags,
                }
                kinds[type(action)].append(action)  # type: ignore[attr-defined]

    def admit(self, key: RequestKey, num_tokens: int, budget_ms: int | None = None) -> None:
        up = D_INC in self.exports.links
        self.p(p.Admit(key, D_INC, num_tokens, budget_ms, link_up=up))

    def compute(self, key: RequestKey, upto: int) -> None:
        """A chunk is launched and its fence is seen."""
        self.p(p.Launched(key, (tuple(range(blocks_for(upto, BLOCK))),), upto))
        self.p(p.Fenced(key, upto))

    def end(self, key: RequestKey, finish: str | None = None) -> None:
        """Token 1 is drawn and the engine lets go."""
        self.p(p.First(key, TOKEN, finish))
        self.p(p.Finished(key, cancelled=False))

    def open(self, key: RequestKey, budget_ms: int | None = None) -> None:
        up = P_INC in self.imports.links
        self.d(d.Opened(key, P_INC, budget_ms, link_up=up))

    def load(self, key: RequestKey, num_tokens: int, hit: int = 0) -> None:
        blocks = tuple(range(100, 100 + blocks_for(num_tokens, BLOCK)))
        self.d(d.Load(key, (blocks,), hit, num_tokens))

    def deliver_p(self, message) -> None:
        self.p(p.ConsumerMessage(message.key, D_INC, message))

    def deliver_d(self, message) -> None:
        self.d(d.PeerMessage(message.key, P_INC, message))

    def read_done(self, read: Read, fault: FailCause | None = None) -> None:
        if read.slot is None:
            actions = self.imports.copy_ended(read.key, read.index, self.now, fault, "")
        else:
            actions = self.imports.read_ended(read.slot, self.now, fault, "")
        self._carry_out(actions, self.to_p, self.d_told)

    def flow(self) -> None:
        """Everything that waits is delivered, packed, read and unpacked, until nothing waits."""
        while self.to_p or self.to_d or self.packs or self.reads or self.unpacks:
            if self.to_p:
                self.deliver_p(self.to_p.pop(0))
            elif self.to_d:
                self.deliver_d(self.to_d.pop(0))
            elif self.packs:
                pack = self.packs.pop(0)
                self.p(p.Packed(pack.key, pack.index, ok=True))
            elif self.reads:
                self.read_done(self.reads.pop(0))
            else:
                unpack = self.unpacks.pop(0)
                self.d(d.Unpacked(unpack.key, unpack.index))

    def after(self, milliseconds: int) -> None:
        """Time passes; deadlines run on both ends."""
        self.now = Millis(self.now + milliseconds)
        self._carry_out(self.exports.expire(self.now), self.to_d, self.p_told)
        self._carry_out(self.imports.expire(self.now), self.to_p, self.d_told)

    def break_link(self) -> None:
        """Both ends learn that the link is lost; what was on its way is lost with it."""
        self.to_p.clear()
        self.to_d.clear()
        self._carry_out(self.exports.link_lost(D_INC, self.now), self.to_d, self.p_told)
        self._carry_out(self.imports.link_lost(P_INC, "lost", self.now), self.to_p, self.d_told)

    def is_free(self) -> bool:
        """Whether nothing is held by slots or keys that have not ended."""
        rings = (self.exports.ring, self.imports.ring)
        slots = all(ring.free == len(ring) for ring in rings)
        return slots and not self.exports.num_leased and not self.imports.num_open
