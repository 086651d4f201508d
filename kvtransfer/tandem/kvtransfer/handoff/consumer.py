"""D's state machine: one pull and one event give the next pull and actions. Pure.

Invariants: ``Loaded`` only after COMMITTED (copies: after all tags matched; or if nothing was
needed). Exactly one ending per key. Blocks are free only when nothing writes them. A slot whose
read is not terminal is quarantined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from tandem.kvtransfer.events import Cancelled, Released
from tandem.kvtransfer.events import Ready as ReadyEvent
from tandem.kvtransfer.handoff.actions import (
    Action,
    Count,
    EmitEvent,
    Free,
    Millis,
    QuarantinePeer,
    Read,
    Send,
    Unpack,
)
from tandem.kvtransfer.handoff.form import Form, WireDtype
from tandem.kvtransfer.handoff.manifest import (
    Item,
    available,
    begins,
    blocks_of,
    covers,
    in_words,
    manifest,
    num_blocks,
)
from tandem.kvtransfer.handoff.messages import (
    Done,
    Final,
    Gone,
    GoneReason,
    Open,
    Part,
    Ready,
    Taken,
    Want,
)
from tandem.kvtransfer.handoff.pull import (
    BY_TIME,
    ConsumerPolicy,
    Event,
    Flight,
    Granted,
    LinkLost,
    Load,
    Opened,
    PeerMessage,
    Pull,
    ReadDone,
    ReadFailed,
    Result,
    UncertainRead,
    Unpacked,
    armed,
    close,
    done_if_complete,
    fail,
    fail_uncertain,
    first_token_ended,
    loaded,
    settled,
)
from tandem.kvtransfer.handoff.tables import CONSUMER, DEvent, DState
from tandem.protocol.errors import FailCause
from tandem.protocol.kv import LoadFailed


def announced(
    direct: bool, items: Iterable[Item], upto: int, num_tokens: int, form: Form | ConsumerPolicy
) -> tuple[int, ...]:
    """Return how many blocks of each item READY names; empty if parts go through slots."""
    size, found = form.block_size, []
    for item in items if direct else ():
        stop = available(item, upto, num_tokens, size)
        found.append(num_blocks(item.start, stop, size) if stop > item.start else 0)
    return tuple(found)


def copies_cut(pull: Pull, policy: ConsumerPolicy) -> Pull:
    """Return the pull with a copy queued for all that is announced and not under way."""
    if not pull.direct or pull.num_tokens is None:
        return pull
    form = pull.form or policy
    size, cut, queued, index = form.block_size, list(pull.cut), list(pull.queued), pull.next_index
    for item, group, remote in zip(pull.items, form.groups, pull.remote, strict=False):
        at = item.group
        until = available(item, pull.upto, pull.num_tokens, size)
        while cut[at] < until:
            start = cut[at]
            stop = min(until, (start // size + group.blocks_per_copy) * size)
            first, count = start // size - item.start // size, num_blocks(start, stop, size)
            theirs = remote[first : first + count]
            nbytes = count * group.block_bytes
            flight = Flight(index, start, stop, None, nbytes, group=at, remote_blocks=theirs)
            queued.append(flight)
            cut[at], index = stop, index + 1
    return msgspec.structs.replace(pull, cut=tuple(cut), queued=tuple(queued), next_index=index)


_ENDED = (DState.FAILING, DState.CLOSED)
_replace = msgspec.structs.replace


def step(pull: Pull | None, event: Event, now: Millis, policy: ConsumerPolicy) -> Result:
    """Return the pull after ``event``, and the actions. A pair without a rule changes nothing."""
    state = None if pull is None else pull.state
    if (state, event.kind) not in CONSUMER:
        return pull, [Count(f"d:{state or 'unknown'}:{event.kind}")]
    if isinstance(event, PeerMessage) and pull is not None and pull.producer != event.source:
        return pull, [Count("d:wrong producer")]
    return _HANDLERS[event.kind](pull, event, now, policy)


def _on_open(_pull: None, event: Opened, now: Millis, policy: ConsumerPolicy) -> Result:
    wait = policy.wait_ms if event.budget_ms is None else event.budget_ms
    budget = Millis(now + wait)
    pull = Pull(
        key=event.key,
        state=DState.WAITING,
        producer=event.producer,
        budget=budget,
        deadline=budget,
        direct=event.direct,
        form=event.form,
    )
    if not event.link_up:
        return fail(
            pull, FailCause.PEER, "no link to the prefill worker", now, policy, notify=False
        )
    return pull, [Send(event.producer, Open(event.key, event.budget_ms, event.hashes))]


def _on_ready(pull: Pull | None, event: PeerMessage, now: Millis, policy: ConsumerPolicy) -> Result:
    ready = event.message
    assert isinstance(ready, Ready)
    if pull is None:
        return None, [Send(event.source, Done(event.key, ok=False))]
    if pull.state is DState.COMMITTING:
        return pull, []
    first = pull.num_tokens is None
    same = first or ready.num_tokens == pull.num_tokens
    if not same or not 0 <= ready.upto <= ready.num_tokens or not ready.num_tokens:
        return fail(pull, FailCause.IDENTITY, "READY contradicts itself", now, policy)
    items = manifest(policy.groups, ready.num_tokens)
    if ready.items != items:
        message = f"READY's manifest is {in_words(ready.items)}, expected is {in_words(items)}"
        return fail(pull, FailCause.IDENTITY, message, now, policy)
    form = pull.form or policy
    counts = announced(pull.direct, items, ready.upto, ready.num_tokens, form)
    if tuple(len(each) for each in ready.blocks) != counts:
        message = f"READY names {_sizes(ready.blocks)} blocks, expected is {counts or 'none'}"
        return fail(pull, FailCause.IDENTITY, message, now, policy)
    actions: list[Action] = []
    if first:
        actions.append(EmitEvent(ReadyEvent(pull.key, ready.num_tokens)))
    pull = _replace(pull, num_tokens=ready.num_tokens, items=items)
    if ready.upto > pull.upto:
        pull = _replace(pull, upto=ready.upto, remote=ready.blocks)
    if pull.state is DState.PULLING:
        pull = copies_cut(pull, policy)
    return armed(pull, now, policy), actions


def _on_final(pull: Pull | None, event: PeerMessage, now: Millis, policy: ConsumerPolicy) -> Result:
    final = event.message
    assert isinstance(final, Final)
    if pull is None:
        return None, [Send(event.source, Done(event.key, ok=False))]
    if pull.state is DState.COMMITTING:
        return pull, []
    if final.finish is not None:
        return first_token_ended(pull, final, final.finish, now, policy)
    pull = _replace(pull, final=final)
    if pull.state is DState.WAITING:
        return pull, []
    return done_if_complete(pull, now, policy, [])


def _on_load(pull: Pull, event: Load, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.state in _ENDED:
        return pull, []
    begun = _begun(pull, event, policy)
    if begun is None:
        message = (
            f"begin_load [{event.from_token}, {event.to_token}) into "
            f"{', '.join(str(len(each)) for each in event.tables)} blocks does not fit a prompt of "
            f"{pull.num_tokens} tokens"
        )
        return fail(pull, FailCause.INTERNAL, message, now, policy)
    pull = _replace(
        pull,
        state=DState.PULLING,
        tables=event.tables,
        start=event.from_token,
        cut=begun,
        reached=begun,
    )
    actions: list[Action] = []
    if pull.direct:
        pull = copies_cut(pull, policy)
    elif event.from_token < event.to_token:
        form = pull.form or policy
        most = tuple(each.blocks_per_part for each in form.groups)
        dtype = WireDtype.AUTO if pull.form is None else pull.form.dtype
        want = Want(pull.key, event.from_token, policy.credits, most, form.block_size, dtype)
        actions.append(Send(pull.producer, want))
    return done_if_complete(pull, now, policy, actions)


def _begun(pull: Pull, event: Load, policy: ConsumerPolicy) -> tuple[int, ...] | None:
    """Return the first required token of each item, or None if the load does not fit the pull."""
    size = policy.block_size
    if event.to_token != pull.num_tokens or len(event.tables) != len(pull.items):
        return None
    if event.from_token == event.to_token:
        return tuple(each.stop for each in pull.items)
    if event.from_token % size:
        return None
    begun = begins(pull.items, event.from_token, min(size, (pull.form or policy).block_size))
    each = zip(pull.items, event.tables, begun, strict=True)
    return begun if all(covers(item, table, at, size) for item, table, at in each) else None


def _on_part(pull: Pull | None, event: PeerMessage, now: Millis, policy: ConsumerPolicy) -> Result:
    part = event.message
    assert isinstance(part, Part)
    if pull is None:
        return None, [Send(event.source, Done(event.key, ok=False))]
    if not _follows(pull, part, policy):
        return fail(pull, FailCause.IDENTITY, "PART does not follow the last", now, policy)
    flight = Flight(part.index, part.start, part.stop, part.slot, part.nbytes, group=part.group)
    cut = (*pull.cut[: part.group], part.stop, *pull.cut[part.group + 1 :])
    pull = _replace(pull, cut=cut, next_index=part.index + 1, queued=(*pull.queued, flight))
    return armed(pull, now, policy), []


def _follows(pull: Pull, part: Part, policy: ConsumerPolicy) -> bool:
    if pull.direct or part.group >= len(pull.items) or pull.num_tokens is None:
        return False
    form = pull.form or policy
    item, group, size = pull.items[part.group], form.groups[part.group], form.block_size
    blocks = num_blocks(part.start, part.stop, size)
    return (
        part.index == pull.next_index
        and part.start == pull.cut[part.group]
        and part.start < part.stop <= available(item, pull.upto, pull.num_tokens, size)
        and (part.stop % size == 0 or part.stop == item.stop)
        and 0 < blocks <= group.blocks_per_part
        and part.nbytes == policy.header_bytes + blocks * group.block_bytes
    )


def _blocks(pull: Pull, flight: Flight, policy: ConsumerPolicy) -> tuple[int, ...]:
    item, table = pull.items[flight.group], pull.tables[flight.group]
    return blocks_of(item, table, flight.start, flight.stop, policy.block_size)


def _sizes(blocks: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(len(each)) for each in blocks) or "no"


def _on_slot(pull: Pull, event: Granted, now: Millis, policy: ConsumerPolicy) -> Result:
    flight = _replace(pull.queued[0], slot=event.slot)
    pull = _replace(pull, queued=pull.queued[1:], reading=(*pull.reading, flight))
    read = Read(
        pull.key,
        pull.producer,
        flight.index,
        flight.remote_slot,
        event.slot,
        flight.nbytes,
        flight.remote_blocks,
        _blocks(pull, flight, policy) if pull.direct else (),
        flight.start,
        flight.stop,
        flight.group,
        pull.form,
    )
    return armed(pull, now, policy), [read]


def _taken_out(flights: tuple[Flight, ...], index: int) -> tuple[Flight, tuple[Flight, ...]]:
    found = next((each for each in flights if each.index == index), None)
    assert found is not None, f"part {index} is not on its way"
    return found, tuple(each for each in flights if each is not found)


def _on_read_done(pull: Pull, event: ReadDone, now: Millis, policy: ConsumerPolicy) -> Result:
    flight, reading = _taken_out(pull.reading, event.index)
    if pull.state is DState.FAILING:
        return _writes_less(_replace(pull, reading=reading))
    pull = _replace(pull, reading=reading, unpacking=(*pull.unpacking, flight))
    unpack = Unpack(
        key=pull.key,
        peer=pull.producer,
        index=flight.index,
        start=flight.start,
        stop=flight.stop,
        slot=flight.slot,
        block_ids=_blocks(pull, flight, policy),
        nbytes=flight.nbytes,
        group=flight.group,
        form=pull.form,
    )
    taken = Send(pull.producer, Taken(pull.key, flight.index))
    return armed(pull, now, policy), [unpack] if pull.direct else [taken, unpack]


def _on_read_failed(pull: Pull, event: ReadFailed, now: Millis, policy: ConsumerPolicy) -> Result:
    flight, reading = _taken_out(pull.reading, event.index)
    pull = _replace(pull, reading=reading)
    if pull.state is DState.FAILING:
        return _writes_less(pull)
    failed, actions = fail(pull, event.cause, event.message, now, policy)
    return failed, [*_freed(flight), *actions]


def _freed(flight: Flight) -> list[Action]:
    return [] if flight.slot is None else [Free(flight.slot)]


def _writes_less(pull: Pull) -> Result:
    if pull.unpacking or pull.reading or pull.uncertain is not None:
        return pull, []
    return _replace(pull, state=DState.CLOSED), [EmitEvent(Released(pull.key))]


def _on_unpacked(pull: Pull, event: Unpacked, now: Millis, policy: ConsumerPolicy) -> Result:
    flight, unpacking = _taken_out(pull.unpacking, event.index)
    freed = _freed(flight)
    pull = _replace(pull, unpacking=unpacking)
    if pull.state is DState.FAILING:
        failing, ended = _writes_less(pull)
        return failing, freed + ended
    if event.fault in (FailCause.IDENTITY, FailCause.DIGEST):
        waiting, asked = fail_uncertain(
            pull, UncertainRead(event.fault, event.message), now, policy
        )
        return waiting, freed + asked
    if event.fault is not None:
        failed, actions = fail(pull, event.fault, event.message, now, policy)
        return failed, freed + actions
    at, more = flight.group, flight.stop - flight.start
    reached = (*pull.reached[:at], pull.reached[at] + more, *pull.reached[at + 1 :])
    pull = _replace(pull, reached=reached)
    return done_if_complete(pull, now, policy, freed)


def _on_committed(pull: Pull, _event: PeerMessage, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.state is DState.CLOSED:
        return pull, []
    closed, ended = loaded(pull, now, policy)
    return closed, [ended]


def _on_gone(pull: Pull, event: PeerMessage, now: Millis, policy: ConsumerPolicy) -> Result:
    gone = event.message
    assert isinstance(gone, Gone)
    if (
        pull.uncertain is not None and gone.reason is GoneReason.ABANDONED
    ):  # abandoned by D: the lease held until then
        quarantine = QuarantinePeer(pull.producer, pull.uncertain.message)
        failed, actions = _settle(pull, pull.uncertain.cause, pull.uncertain.message, now, policy)
        return failed, [*actions, quarantine]
    message = f"the prefill worker let go: {gone.reason}"
    if pull.uncertain is not None:
        return _settle(pull, FailCause.GONE, message, now, policy)
    if pull.state in _ENDED:
        return pull, []
    if now >= pull.budget and gone.reason in BY_TIME:
        return _on_timeout(pull, event, now, policy)
    return fail(pull, FailCause.GONE, message, now, policy)


def _settle(
    pull: Pull, cause: FailCause, message: str, now: Millis, policy: ConsumerPolicy
) -> Result:
    def ending(blocks_free: bool) -> EmitEvent:
        return EmitEvent(LoadFailed(pull.key, cause, message, blocks_free))

    return settled(pull, ending, now, policy)


def _on_cancel(pull: Pull, _event: Event, now: Millis, policy: ConsumerPolicy) -> Result:
    def ending(blocks_free: bool) -> EmitEvent:
        return EmitEvent(Cancelled(pull.key, blocks_free))

    if pull.uncertain is not None:
        return settled(pull, ending, now, policy)
    if pull.state in _ENDED:
        return pull, []
    return close(pull, now, policy, ending, notify=True)


def _on_link_lost(pull: Pull, event: LinkLost, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.uncertain is not None:
        return _settle(pull, FailCause.PEER, event.reason, now, policy)
    if pull.state in _ENDED:
        return pull, []
    return fail(pull, FailCause.PEER, event.reason, now, policy, notify=False)


def _on_timeout(pull: Pull, _event: Event, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.state is DState.CLOSED:
        return None, []
    if pull.uncertain is not None:
        return _settle(pull, FailCause.TIMEOUT, f"{pull.uncertain.message}; no answer", now, policy)
    if pull.state is DState.FAILING:
        later = Millis(now + policy.tombstone_ms)
        return _replace(pull, deadline=later), [Count("d:copy or unpack is slow")]
    why = "the budget is spent" if pull.deadline == pull.budget else f"no progress: {pull.state}"
    return fail(pull, FailCause.TIMEOUT, why, now, policy)


_HANDLERS: dict[DEvent, Callable[..., Result]] = {
    DEvent.OPEN: _on_open,
    DEvent.READY: _on_ready,
    DEvent.FINAL: _on_final,
    DEvent.LOAD: _on_load,
    DEvent.PART: _on_part,
    DEvent.SLOT: _on_slot,
    DEvent.READ_DONE: _on_read_done,
    DEvent.READ_FAILED: _on_read_failed,
    DEvent.UNPACKED: _on_unpacked,
    DEvent.COMMITTED: _on_committed,
    DEvent.GONE: _on_gone,
    DEvent.CANCEL: _on_cancel,
    DEvent.LINK_LOST: _on_link_lost,
    DEvent.TIMEOUT: _on_timeout,
}
