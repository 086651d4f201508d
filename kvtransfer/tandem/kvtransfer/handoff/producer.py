"""P's state machine: one export and one event give the next export and actions. Pure.

Invariants: READY only after the fence. GONE before the blocks are reused. Blocks are released once,
after the engine has released them. A slot that D may read is not reused before D answered or its
link is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.kvtransfer.events import LoadFailed, Wanted
from tandem.kvtransfer.handoff.actions import Action, Count, EmitEvent, Free, Millis, Pack, Send
from tandem.kvtransfer.handoff.export import (
    Admit,
    Begun,
    Cancel,
    ConsumerMessage,
    Event,
    Export,
    Fenced,
    Finished,
    First,
    Granted,
    Launched,
    Out,
    Packed,
    ProducerPolicy,
)
from tandem.kvtransfer.handoff.form import WireDtype, form_of_parts
from tandem.kvtransfer.handoff.lease import (
    ENDED,
    Result,
    announce,
    answered_tombstone,
    end,
    free_sent,
    next_part,
    ready_message,
    release,
    tags,
    tombstone,
    why,
)
from tandem.kvtransfer.handoff.manifest import begins, blocks_of, is_complete, manifest, num_blocks
from tandem.kvtransfer.handoff.messages import (
    Committed,
    Final,
    Gone,
    GoneReason,
    Open,
    Part,
    Taken,
    Want,
)
from tandem.kvtransfer.handoff.tables import PRODUCER, PEvent, PState
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import NO_INCARNATION

_replace = msgspec.structs.replace


def step(export: Export | None, event: Event, now: Millis, policy: ProducerPolicy) -> Result:
    """Return the export after ``event``, and the actions. A pair without a rule changes nothing."""
    state = None if export is None else export.state
    if (state, event.kind) not in PRODUCER:
        return export, [Count(f"p:{state or 'unknown'}:{event.kind}")]
    if (
        isinstance(event, ConsumerMessage)
        and export is not None
        and (export.consumer not in (event.source, NO_INCARNATION))
    ):
        return export, [
            Count("p:wrong consumer"),
            Send(event.source, Gone(event.key, GoneReason.UNKNOWN)),
        ]
    return _HANDLERS[event.kind](export, event, now, policy)


def _on_admit(export: Export | None, event: Admit, now: Millis, policy: ProducerPolicy) -> Result:
    budget = None if event.budget_ms is None else Millis(now + event.budget_ms)
    opened = export is not None and export.consumer == event.consumer
    if export is not None and export.state in ENDED:
        return _admit_late(export)
    actions: list[Action] = []
    if export is not None and not opened:
        actions.append(Send(export.consumer, Gone(event.key, GoneReason.UNKNOWN)))
    admitted = Export(
        key=event.key,
        state=PState.COMPUTING,
        deadline=Millis(now + policy.wait_ms) if budget is None else budget,
        budget=budget,
        consumer=event.consumer,
        direct=event.direct,
        num_tokens=event.num_tokens,
        items=manifest(policy.groups, event.num_tokens),
        opened=opened,
        engine_holds=True,
    )
    if event.link_up:
        return admitted, actions
    gone, more = end(admitted, GoneReason.PEER_LOST, now, policy, answered=True)
    return gone, actions + more


def _admit_late(export: Export) -> Result:
    if export.engine_holds:
        return export, [Count("p:admitted twice")]
    message = f"the hand-off had ended before it was admitted: {why(export)}"
    revoked = EmitEvent(LoadFailed(export.key, FailCause.GONE, message))
    return _replace(export, engine_holds=True), [revoked]


def _on_refuse(export: Export | None, event: Event, now: Millis, policy: ProducerPolicy) -> Result:
    if export is None:
        return tombstone(event.key, GoneReason.REFUSED, now, policy), []
    return answered_tombstone(export, GoneReason.REFUSED, now, policy)


def _on_begun(export: Export, _event: Begun, now: Millis, policy: ProducerPolicy) -> Result:
    if export.state in ENDED or export.begun:
        return export, []
    return announce(_replace(export, begun=True), now, policy)


def _on_launched(export: Export, event: Launched, _now: Millis, _policy: ProducerPolicy) -> Result:
    if export.state in ENDED:
        return export, []
    return _replace(export, tables=event.tables, launched=event.upto, begun=True), []


def _on_fenced(export: Export, event: Fenced, now: Millis, policy: ProducerPolicy) -> Result:
    if export.state in ENDED:
        return export, []
    ready = min(max(export.ready, event.upto), export.launched)
    if ready == export.ready:
        return export, [Count("p:fence out of order")]
    fenced = _replace(export, ready=ready)
    announced, actions = announce(fenced, now, policy)
    return announced, tags(fenced, export.ready, policy) + actions


def _on_first(export: Export, event: First, now: Millis, policy: ProducerPolicy) -> Result:
    if export.state in ENDED:
        return export, []
    final = Final(event.key, event.first, event.finish)
    return announce(_replace(export, final=final), now, policy, ready_sent=True)


def _on_finished(export: Export, event: Finished, now: Millis, policy: ProducerPolicy) -> Result:
    if not export.engine_holds:
        return export, [Count("p:finished twice")]
    export = _replace(export, engine_holds=False)
    if export.state in ENDED:
        return export, release(export)
    if event.cancelled or export.final is None:
        return end(export, GoneReason.CANCELLED, now, policy, answered=False)
    return export, []


def _on_cancel(export: Export | None, event: Cancel, now: Millis, policy: ProducerPolicy) -> Result:
    if export is None:
        return tombstone(event.key, event.reason, now, policy), []
    if export.state in ENDED:
        return export, []
    if export.state is PState.EXPECTED:
        return answered_tombstone(export, event.reason, now, policy)
    return end(export, event.reason, now, policy, answered=False)


def _on_open(
    export: Export | None, event: ConsumerMessage, now: Millis, policy: ProducerPolicy
) -> Result:
    message = event.message
    assert isinstance(message, Open)
    if export is None:
        wait = policy.expect_ms
        if message.budget_ms is not None:
            wait = min(wait, message.budget_ms)
        expected = Export(
            key=event.key,
            state=PState.EXPECTED,
            consumer=event.source,
            opened=True,
            deadline=Millis(now + wait),
        )
        if not message.hashes:
            return expected, []
        return expected, [EmitEvent(Wanted(event.key, event.source, message.hashes, wait))]
    if export.state is PState.EXPECTED:
        return export, []
    if export.state in ENDED:
        return export, [Send(event.source, Gone(event.key, why(export)))]
    export = _replace(export, opened=True)
    actions: list[Action] = []
    if export.begun:
        actions.append(Send(export.consumer, ready_message(export, policy)))
    if export.state is PState.LEASED and export.final is not None:
        actions.append(Send(export.consumer, export.final))
    return export, actions


def _on_want(
    export: Export | None, event: ConsumerMessage, now: Millis, policy: ProducerPolicy
) -> Result:
    want = event.message
    assert isinstance(want, Want)
    if export is None or export.state in ENDED:
        reason = GoneReason.UNKNOWN if export is None else why(export)
        return export, [Send(event.source, Gone(event.key, reason))]
    fits = not want.from_token % want.block_size and want.from_token <= export.num_tokens
    fits = fits and not policy.block_size % want.block_size
    narrow = want.dtype is WireDtype.FP8
    fits = fits and not (narrow and any(each.item_bytes < 2 for each in policy.groups))
    groups = len(want.max_blocks) == len(export.items)
    if export.direct or export.wants or not (fits and groups):
        return end(export, GoneReason.PROTOCOL, now, policy, answered=False)
    wanting = _replace(
        export,
        wants=True,
        packed=begins(export.items, want.from_token, want.block_size),
        credits=want.credits,
        max_blocks=want.max_blocks,
        form=form_of_parts(policy.groups, policy.block_size, want.block_size, want.dtype),
    )
    return wanting, []


def _on_slot(export: Export, event: Granted, _now: Millis, policy: ProducerPolicy) -> Result:
    due = next_part(export, policy)
    assert due is not None, "a part was granted that is not due"
    group, stop = due
    start, index, key = export.packed[group], export.next_index, export.key
    table = export.tables[group]
    blocks = blocks_of(export.items[group], table, start, stop, policy.block_size)
    out = Out(index, event.slot, start, stop, group=group)
    action = Pack(key, export.consumer, index, start, stop, event.slot, blocks, group, export.form)
    packed = (*export.packed[:group], stop, *export.packed[group + 1 :])
    return _replace(export, packed=packed, next_index=index + 1, out=(*export.out, out)), [action]


def _part(export: Export, out: Out, policy: ProducerPolicy) -> Part:
    form = export.form or policy
    count = num_blocks(out.start, out.stop, form.block_size)
    nbytes = policy.header_bytes + count * form.groups[out.group].block_bytes
    return Part(export.key, out.index, out.start, out.stop, out.slot, nbytes, out.group)


def _on_packed(export: Export, event: Packed, now: Millis, policy: ProducerPolicy) -> Result:
    out = next((o for o in export.out if o.index == event.index and not o.sent), None)
    if out is None:
        return export, [Count("p:packed twice")]
    if export.state is PState.GONE or not event.ok:
        rest = tuple(o for o in export.out if o is not out)
        export = _replace(export, out=rest)
        freed: list[Action] = [Free(out.slot)]
        if export.state is PState.GONE:
            return export, freed
        ended, actions = end(export, GoneReason.INTERNAL, now, policy, answered=False)
        return ended, freed + actions
    sent = tuple(_replace(o, sent=True) if o is out else o for o in export.out)
    return _replace(export, out=sent), [Send(export.consumer, _part(export, out, policy))]


def _on_taken(
    export: Export, event: ConsumerMessage, _now: Millis, _policy: ProducerPolicy
) -> Result:
    taken = event.message
    assert isinstance(taken, Taken)
    out = next((o for o in export.out if o.index == taken.index and o.sent), None)
    if out is None:
        return export, [Count("p:taken twice")]
    rest = tuple(o for o in export.out if o is not out)
    return _replace(export, out=rest), [Free(out.slot)]


def _on_done_ok(export: Export | None, event: Event, now: Millis, policy: ProducerPolicy) -> Result:
    if export is None or export.state is PState.GONE:
        return _answer_gone(export, event)
    if export.state is PState.CLOSED:
        return export, [Send(export.consumer, Committed(export.key))]
    whole = export.direct or (export.wants and is_complete(export.items, export.packed))
    if export.state is PState.COMPUTING or not whole or any(not o.sent for o in export.out):
        return end(export, GoneReason.PROTOCOL, now, policy, answered=True)
    export, actions = free_sent(export)
    actions.append(Send(export.consumer, Committed(export.key)))
    if not export.engine_holds:
        actions += release(export)
    closed = _replace(
        export,
        state=PState.CLOSED,
        wants=False,
        deadline=Millis(now + policy.tombstone_ms),
    )
    return closed, actions


def _answer_gone(export: Export | None, event: Event) -> Result:
    assert isinstance(event, ConsumerMessage)
    if export is None:
        return None, [Send(event.source, Gone(event.key, GoneReason.UNKNOWN))]
    export, actions = free_sent(export)
    actions.append(Send(event.source, Gone(event.key, export.reason)))
    return export, actions


def _on_done_abandon(
    export: Export | None, event: Event, now: Millis, policy: ProducerPolicy
) -> Result:
    if export is None or export.state is PState.GONE:
        return _answer_gone(export, event)
    if export.state is PState.CLOSED:
        return export, []
    if export.state is PState.EXPECTED:
        return answered_tombstone(export, GoneReason.ABANDONED, now, policy)
    return end(export, GoneReason.ABANDONED, now, policy, answered=True)


def _on_link_lost(export: Export, _event: Event, now: Millis, policy: ProducerPolicy) -> Result:
    if export.state is PState.EXPECTED:
        return None, []
    if export.state is PState.CLOSED:
        return export, []
    if export.state is PState.GONE:
        return free_sent(export)
    return end(export, GoneReason.PEER_LOST, now, policy, answered=True)


def _on_timeout(export: Export, _event: Event, now: Millis, policy: ProducerPolicy) -> Result:
    if export.state is PState.EXPECTED:
        return answered_tombstone(export, GoneReason.UNKNOWN, now, policy)
    if export.state not in ENDED:
        return end(export, GoneReason.EXPIRED, now, policy, answered=False)
    if export.engine_holds or export.out:
        later = Millis(now + policy.tombstone_ms)
        return _replace(export, deadline=later), [Count("p:tombstone held")]
    return None, []


_HANDLERS: dict[PEvent, Callable[..., Result]] = {
    PEvent.ADMIT: _on_admit,
    PEvent.REFUSE: _on_refuse,
    PEvent.BEGUN: _on_begun,
    PEvent.LAUNCHED: _on_launched,
    PEvent.FENCED: _on_fenced,
    PEvent.FIRST: _on_first,
    PEvent.FINISHED: _on_finished,
    PEvent.CANCEL: _on_cancel,
    PEvent.OPEN: _on_open,
    PEvent.WANT: _on_want,
    PEvent.SLOT: _on_slot,
    PEvent.PACKED: _on_packed,
    PEvent.TAKEN: _on_taken,
    PEvent.DONE_OK: _on_done_ok,
    PEvent.DONE_ABANDON: _on_done_abandon,
    PEvent.LINK_LOST: _on_link_lost,
    PEvent.TIMEOUT: _on_timeout,
}
