"""The running classes with one guard taken out each; the checker must find the harm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from tandem.kvtransfer.events import Cancelled
from tandem.kvtransfer.handoff import export as p_events
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import Action, EmitEvent, Millis, Send
from tandem.kvtransfer.handoff.consumer import step as d_step
from tandem.kvtransfer.handoff.export import Export, ProducerPolicy
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.lease import Result as PResult
from tandem.kvtransfer.handoff.manifest import Item
from tandem.kvtransfer.handoff.messages import Committed, Done, Gone, GoneReason
from tandem.kvtransfer.handoff.producer import step as p_step
from tandem.kvtransfer.handoff.pull import ConsumerPolicy, Pull, SlotRing, done_if_complete
from tandem.kvtransfer.handoff.pull import Result as DResult
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.memory.blocks import BlockTags
from tandem.kvtransfer.transports.agent.landing import Landing
from tandem.link.session import LinkState, Session, Verdict
from tandem.protocol.card import KVKind
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import LoadFailed
from tandem.protocol.link import Header
from tandem.protocol.messages import Hello


def _commit_at_once(
    pull: Pull | None, event: d_events.Event, now: Millis, policy: ConsumerPolicy
) -> DResult:
    after, actions = d_step(pull, event, now, policy)
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Done) and action.message.ok:
            told = d_events.PeerMessage(event.key, action.to, Committed(event.key))
            after, more = d_step(after, told, now, policy)
            return after, actions + more
    return after, actions


class NoCommit(ImportTable):
    """D uses what it has read without P's word."""

    machine = staticmethod(_commit_at_once)


def _announce_at_launch(
    export: Export | None, event: p_events.Event, now: Millis, policy: ProducerPolicy
) -> PResult:
    after, actions = p_step(export, event, now, policy)
    if isinstance(event, p_events.Launched):
        fenced = p_events.Fenced(event.key, event.upto)
        after, more = p_step(after, fenced, now, policy)
        actions = actions + more
    return after, actions


class NoFence(ExportTable):
    """P announces a chunk when it is launched."""

    machine = staticmethod(_announce_at_launch)


def _free_at_once(
    pull: Pull | None, event: d_events.Event, now: Millis, policy: ConsumerPolicy
) -> DResult:
    after, actions = d_step(pull, event, now, policy)
    ended = pull is not None and pull.state is not DState.FAILING
    if after is None or after.state is not DState.FAILING or after.unpacking or not ended:
        return after, actions
    freed: list[Action] = [
        EmitEvent(replace(each.event, blocks_free=True))
        if isinstance(each, EmitEvent) and isinstance(each.event, Cancelled | LoadFailed)
        else each
        for each in actions
    ]
    return msgspec.structs.replace(after, state=DState.CLOSED, reading=()), freed


class NoWait(ImportTable):
    """D's blocks are free as soon as nobody wants what is copied into them."""

    machine = staticmethod(_free_at_once)

    def copy_ended(
        self, key: RequestKey, index: int, *rest: object, **more: object
    ) -> list[Action]:
        pull = self.pulls.get(key)
        known = pull is not None and any(each.index == index for each in pull.reading)
        return super().copy_ended(key, index, *rest, **more) if known else []  # type: ignore[arg-type]


def _without(
    choices: Callable[[Sequence[Item]], Iterable[Sequence[Item]]],
    pull: Pull | None,
    event: d_events.Event,
    now: Millis,
    policy: ConsumerPolicy,
) -> DResult:
    """End as soon as all items but those of one of the ``choices`` are complete."""
    after, actions = d_step(pull, event, now, policy)
    if after is None or after.state is not DState.PULLING:
        return after, actions
    for left_out in choices(after.items):
        reached = [
            item.stop if item in left_out else at
            for item, at in zip(after.items, after.reached, strict=True)
        ]
        some = msgspec.structs.replace(after, reached=tuple(reached))
        done, more = done_if_complete(some, now, policy, list(actions))
        if done is not None and done.state is not DState.PULLING:
            return msgspec.structs.replace(done, reached=after.reached), more
    return after, actions


class AllButOneItem(ImportTable):
    """D commits although one item is incomplete."""

    machine = staticmethod(partial(_without, lambda items: [[each] for each in items]))


def _windows(items: Sequence[Item]) -> Iterable[Sequence[Item]]:
    return [[each for each in items if each.kind is KVKind.WINDOW]]


class NoWindowItem(ImportTable):
    """D commits although items of windows are missing."""

    machine = staticmethod(partial(_without, _windows))


def _fence_of_any_chunk(
    export: Export | None, event: p_events.Event, now: Millis, policy: ProducerPolicy
) -> PResult:
    if isinstance(event, p_events.Fenced) and export is not None:
        event = p_events.Fenced(event.key, export.launched)
    return p_step(export, event, now, policy)


class AnyFence(ExportTable):
    """The fence of a chunk counts for all that are launched, also for the last token's state."""

    machine = staticmethod(_fence_of_any_chunk)


class NoClearing(BlockTags):
    """A tag stays where it is when the lease behind it ends."""

    def clear(self, key: RequestKey) -> None:
        """Nothing."""


class NoSharing(BlockTags):
    """Who lets go of a block clears its tag, whoever else has leased it."""

    def clear(self, key: RequestKey) -> None:
        for block, _ in self._by_key.get(key, ()):
            self._holders[block] = 1
        super().clear(key)


def _blame_at_once(
    pull: Pull | None, event: d_events.Event, now: Millis, policy: ConsumerPolicy
) -> DResult:
    after, actions = d_step(pull, event, now, policy)
    if (
        after is None
        or after.uncertain is None
        or (pull is not None and pull.uncertain is not None)
    ):
        return after, actions
    told = d_events.PeerMessage(event.key, after.producer, Gone(event.key, GoneReason.ABANDONED))
    after, more = d_step(after, told, now, policy)
    return after, actions + more


class HastyBlame(ImportTable):
    """The tag or header of another speaks against the link, whether P's lease stood or not."""

    machine = staticmethod(_blame_at_once)


class NoQuarantine(SlotRing):
    """A slot is free as soon as nobody wants its read."""

    def quarantine(self, slot: int) -> None:
        self.give(slot)


class NoLandingQuarantine(Landing):
    """A landing slot is free as soon as nobody wants what the agent writes there."""

    ring_type = NoQuarantine


class NoIncarnation(Session):
    """Any frame is taken, whoever sent it to whomever."""

    __slots__ = ()

    def answer(self, header: Header, hello: Hello) -> str | None:
        return super().answer(Header(header.source, self.me, 0), hello)

    def take(self, header: Header, message: object, now: float) -> Verdict:
        """Yes; and who spoke first stays the peer."""
        source = self.peer if self.state is LinkState.UP else header.source
        return super().take(Header(source, self.me, self._expected), message, now)
