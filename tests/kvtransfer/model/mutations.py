"""The running classes with one guard taken out each; the checker must find the harm."""

from __future__ import annotations

from tandem.kvtransfer.handoff import export as p_events
from tandem.kvtransfer.handoff import pull as d_events
from tandem.kvtransfer.handoff.actions import Millis, Send
from tandem.kvtransfer.handoff.consumer import Result as DResult
from tandem.kvtransfer.handoff.consumer import step as d_step
from tandem.kvtransfer.handoff.export import Export, ProducerPolicy
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.imports import ImportTable
from tandem.kvtransfer.handoff.lease import Result as PResult
from tandem.kvtransfer.handoff.messages import Committed, Done
from tandem.kvtransfer.handoff.producer import step as p_step
from tandem.kvtransfer.handoff.pull import ConsumerPolicy, Pull
from tandem.kvtransfer.handoff.slots import SlotRing
from tandem.link.session import LinkState, Session, Verdict
from tandem.protocol.link import Header
from tandem.protocol.messages import Hello


def _commit_at_once(
    pull: Pull | None, event: d_events.Event, now: Millis, policy: ConsumerPolicy
) -> DResult:
    after, actions = d_step(pull, event, now, policy)
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Done) and action.message.ok:
            told = d_events.Told(event.key, action.to, Committed(event.key))
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


class NoQuarantine(SlotRing):
    """A slot is free as soon as nobody wants its read."""

    def quarantine(self, slot: int) -> None:
        """Give it back."""
        self.give(slot)


class NoIncarnation(Session):
    """Any frame is taken, whoever sent it to whomever."""

    __slots__ = ()

    def answer(self, header: Header, hello: Hello) -> str | None:
        """As if it were for this process."""
        return super().answer(Header(header.source, self.me, 0), hello)

    def take(self, header: Header, message: object, now: float) -> Verdict:
        """Yes; and who spoke first stays the peer."""
        source = self.peer if self.state is LinkState.UP else header.source
        return super().take(Header(source, self.me, self._expected), message, now)
