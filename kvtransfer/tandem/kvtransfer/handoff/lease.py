"""Shared code of P's handlers: cutting parts, announcing, ending. Pure; only for ``producer``."""

from __future__ import annotations

import msgspec

from tandem.kvtransfer.handoff.actions import Action, EmitEvent, Free, Millis, Send, Tag, Untag
from tandem.kvtransfer.handoff.export import Export, ProducerPolicy
from tandem.kvtransfer.handoff.manifest import available, blocks_of
from tandem.kvtransfer.handoff.messages import Gone, GoneReason, Ready
from tandem.kvtransfer.handoff.tables import PState
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import LoadFailed, Released

Result = tuple[Export | None, list[Action]]

ENDED = (PState.GONE, PState.CLOSED)
_CAUSE = {
    GoneReason.EXPIRED: FailCause.TIMEOUT,
    GoneReason.PEER_LOST: FailCause.PEER,
    GoneReason.INTERNAL: FailCause.INTERNAL,
}
_replace = msgspec.structs.replace


def can_cut(export: Export, policy: ProducerPolicy) -> bool:
    """Return whether the export could cut a part now."""
    return (
        export.wants
        and export.state in (PState.COMPUTING, PState.LEASED)
        and len(export.out) < export.credits
        and next_part(export, policy) is not None
    )


def next_part(export: Export, policy: ProducerPolicy) -> tuple[int, int] | None:
    """Return the item of the next part and its end: whole blocks, except at the item's end."""
    form = export.form or policy
    size = form.block_size
    for item in export.items:
        at = item.group
        packed, upto = export.packed[at], available(item, export.ready, export.num_tokens, size)
        if upto > packed:
            blocks = min(form.groups[at].blocks_per_part, export.max_blocks[at])
            return at, min(upto, packed + blocks * size)
    return None


def tags(export: Export, before: int, policy: ProducerPolicy) -> list[Action]:
    """Tag the blocks written since ``before`` tokens were, if peers read blocks."""
    found: list[Action] = []
    size = policy.block_size
    for item in export.items if export.direct else ():
        start = max(item.start, available(item, before, export.num_tokens, size))
        stop = available(item, export.ready, export.num_tokens, size)
        if stop > start:
            ids = blocks_of(item, export.tables[item.group], start, stop, size)
            found.append(Tag(export.key, item.group, start // size, ids))
    return found


def release(export: Export) -> list[Action]:
    """Return the blocks to the engine, which may write them at once."""
    released = EmitEvent(Released(export.key))
    return [Untag(export.key), released] if export.direct else [released]


def tombstone(key: RequestKey, reason: GoneReason, now: Millis, policy: ProducerPolicy) -> Export:
    """Return the record of a key that must not be leased."""
    return Export(
        key=key,
        state=PState.GONE,
        reason=reason,
        deadline=Millis(now + policy.tombstone_ms),
    )


def end(
    export: Export, reason: GoneReason, now: Millis, policy: ProducerPolicy, *, answered: bool
) -> Result:
    """Turn GONE. ``answered``: D reads no more (it sent DONE, or its link is lost)."""
    actions: list[Action] = []
    if reason is not GoneReason.PEER_LOST and export.opened:
        actions.append(Send(export.consumer, Gone(export.key, reason)))
    if answered:
        export, freed = free_sent(export)
        actions += freed
    if not export.engine_holds:
        actions += release(export)
    elif export.final is None and reason is not GoneReason.CANCELLED:
        cause = _CAUSE.get(reason, FailCause.GONE)
        actions.append(EmitEvent(LoadFailed(export.key, cause, f"the export has ended: {reason}")))
    gone = _replace(
        export,
        state=PState.GONE,
        reason=reason,
        wants=False,
        deadline=Millis(now + policy.tombstone_ms),
    )
    return gone, actions


def answered_tombstone(
    export: Export, reason: GoneReason, now: Millis, policy: ProducerPolicy
) -> Result:
    """End an expected key that will not come: send GONE, hold nothing."""
    gone = _replace(
        export, state=PState.GONE, reason=reason, deadline=Millis(now + policy.tombstone_ms)
    )
    return gone, [Send(export.consumer, Gone(export.key, reason))]


def announce(
    export: Export, now: Millis, policy: ProducerPolicy, *, ready_sent: bool = False
) -> Result:
    """Send READY, also of no token when the engine begins, so that D can reserve. Send FINAL, which
    starts the cap, once all is fenced and token 1 known."""
    actions: list[Action] = []
    if export.opened and export.begun and not ready_sent:
        actions.append(Send(export.consumer, ready_message(export, policy)))
    if export.final is not None and export.ready == export.num_tokens:
        cap = Millis(now + policy.lease_ms)
        if export.budget is not None:
            cap = min(cap, export.budget)
        export = _replace(export, state=PState.LEASED, deadline=cap)
        if export.opened and export.final is not None:
            actions.append(Send(export.consumer, export.final))
    return export, actions


def ready_message(export: Export, policy: ProducerPolicy) -> Ready:
    """Return READY of all that is announced, with the blocks if D reads them itself."""
    size = policy.block_size
    blocks: list[tuple[int, ...]] = []
    for item in export.items if export.direct else ():
        stop = available(item, export.ready, export.num_tokens, size)
        some = stop > item.start
        table = export.tables[item.group] if some else ()
        blocks.append(blocks_of(item, table, item.start, stop, size) if some else ())
    return Ready(export.key, export.ready, export.num_tokens, export.items, tuple(blocks))


def why(export: Export) -> GoneReason:
    """Return the reason to answer under an ended key."""
    return GoneReason.CLOSED if export.state is PState.CLOSED else export.reason


def free_sent(export: Export) -> tuple[Export, list[Action]]:
    """Free slots that D no longer reads; those being packed stay."""
    freed: list[Action] = [Free(o.slot) for o in export.out if o.sent]
    return _replace(export, out=tuple(o for o in export.out if not o.sent)), freed
