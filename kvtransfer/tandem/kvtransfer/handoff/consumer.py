"""D's machine: one pull, one event, what follows. Pure.

``step`` is called by ``imports.ImportTable`` alone. It promises: ``Loaded`` only after COMMITTED
(or when nothing was wanted); exactly one ending per key; blocks are free only when nothing
writes them; a slot whose read is not terminal is quarantined, never given back.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.kvtransfer.events import BlocksFree, Cancelled, FirstTokenEnded, Loaded
from tandem.kvtransfer.events import Ready as ReadyEvent
from tandem.kvtransfer.handoff.actions import (
    Action,
    Count,
    Free,
    Millis,
    Quarantine,
    Read,
    Send,
    Tell,
    Unpack,
)
from tandem.kvtransfer.handoff.messages import Done, Final, Gone, Open, Part, Ready, Taken, Want
from tandem.kvtransfer.handoff.pull import (
    ConsumerPolicy,
    Event,
    Flight,
    Granted,
    LinkLost,
    Load,
    Opened,
    Pull,
    ReadDone,
    ReadFailed,
    Told,
    Unpacked,
)
from tandem.kvtransfer.handoff.tables import CONSUMER, DEvent, DState
from tandem.protocol.errors import FailCause
from tandem.protocol.kv import LoadFailed
from tandem.protocol.layout import blocks_for

Result = tuple[Pull | None, list[Action]]

_ENDED = (DState.FAILING, DState.CLOSED)
_replace = msgspec.structs.replace


def step(pull: Pull | None, event: Event, now: Millis, policy: ConsumerPolicy) -> Result:
    """The pull after ``event``, and what to do. A pair without a rule changes nothing."""
    state = None if pull is None else pull.state
    if (state, event.kind) not in CONSUMER:
        return pull, [Count(f"d:{state or 'unknown'}:{event.kind}")]
    if isinstance(event, Told) and pull is not None and pull.producer != event.source:
        return pull, [Count("d:wrong producer")]
    return _HANDLERS[event.kind](pull, event, now, policy)


def _armed(pull: Pull, now: Millis, policy: ConsumerPolicy) -> Pull:
    """The pull with the deadline that its progress earns: only what is due makes time run."""
    deadline = pull.budget
    if pull.state is DState.COMMITTING:
        deadline = min(deadline, Millis(now + policy.commit_ms))
    elif pull.state is DState.PULLING and _is_due(pull, policy):
        deadline = min(deadline, Millis(now + policy.transfer_ms))
    return pull if deadline == pull.deadline else _replace(pull, deadline=deadline)


def _is_due(pull: Pull, policy: ConsumerPolicy) -> bool:
    """Whether P or the transport owes something: announced parts, or FINAL after the last."""
    assert pull.start is not None
    if pull.upto == pull.num_tokens:
        return True
    return pull.start + pull.unpacked < pull.upto - pull.upto % policy.block_size


def _close(
    pull: Pull, now: Millis, policy: ConsumerPolicy, ending: Callable[[bool], Tell], *, say: bool
) -> Result:
    """End without success: abandon, quarantine what is being read, tell the engine."""
    actions: list[Action] = []
    if say:
        actions.append(Send(pull.producer, Done(pull.key, ok=False)))
    actions += [Quarantine(each.slot) for each in pull.reading if each.slot is not None]
    blocks_free = not pull.unpacking
    actions.append(ending(blocks_free))
    closed = _replace(
        pull,
        state=DState.CLOSED if blocks_free else DState.FAILING,
        queued=(),
        reading=(),
        deadline=Millis(now + policy.tombstone_ms),
    )
    return closed, actions


def _fail(
    pull: Pull,
    cause: FailCause,
    message: str,
    now: Millis,
    policy: ConsumerPolicy,
    *,
    say: bool = True,
) -> Result:
    def ending(blocks_free: bool) -> Tell:
        return Tell(LoadFailed(pull.key, cause, message, blocks_free))

    return _close(pull, now, policy, ending, say=say)


def _first_token_ended(
    pull: Pull, final: Final, finish: str, now: Millis, policy: ConsumerPolicy
) -> Result:
    def ending(blocks_free: bool) -> Tell:
        return Tell(FirstTokenEnded(pull.key, final.first, finish, blocks_free))

    return _close(pull, now, policy, ending, say=True)


def _loaded(pull: Pull, now: Millis, policy: ConsumerPolicy) -> tuple[Pull, Tell]:
    assert pull.final is not None
    closed = _replace(pull, state=DState.CLOSED, deadline=Millis(now + policy.tombstone_ms))
    return closed, Tell(Loaded(pull.key, pull.final.first))


def _done_if_complete(
    pull: Pull, now: Millis, policy: ConsumerPolicy, actions: list[Action]
) -> Result:
    """After any progress in PULLING: done with everything?"""
    assert pull.start is not None
    if pull.final is not None and pull.num_tokens is not None:
        if pull.start == pull.num_tokens:
            closed, told = _loaded(pull, now, policy)
            return closed, [*actions, Send(pull.producer, Done(pull.key, ok=False)), told]
        if pull.start + pull.unpacked == pull.num_tokens:
            committing = _replace(pull, state=DState.COMMITTING)
            actions.append(Send(pull.producer, Done(pull.key, ok=True)))
            return _armed(committing, now, policy), actions
    return _armed(pull, now, policy), actions


def _on_open(_pull: None, event: Opened, now: Millis, policy: ConsumerPolicy) -> Result:
    wait = policy.wait_ms if event.budget_ms is None else event.budget_ms
    budget = Millis(now + wait)
    pull = Pull(
        key=event.key,
        state=DState.WAITING,
        producer=event.producer,
        budget=budget,
        deadline=budget,
    )
    if not event.link_up:
        return _fail(pull, FailCause.PEER, "no link to the prefill worker", now, policy, say=False)
    return pull, [Send(event.producer, Open(event.key, event.budget_ms))]


def _on_ready(pull: Pull | None, event: Told, now: Millis, policy: ConsumerPolicy) -> Result:
    ready = event.message
    assert isinstance(ready, Ready)
    if pull is None:
        return None, [Send(event.source, Done(event.key, ok=False))]
    if pull.state is DState.COMMITTING:
        return pull, []
    first = pull.num_tokens is None
    same = first or ready.num_tokens == pull.num_tokens
    if not same or not 0 < ready.upto <= ready.num_tokens:
        return _fail(pull, FailCause.IDENTITY, "READY contradicts itself", now, policy)
    actions: list[Action] = []
    if first:
        actions.append(Tell(ReadyEvent(pull.key, ready.num_tokens)))
    pull = _replace(pull, num_tokens=ready.num_tokens, upto=max(pull.upto, ready.upto))
    return _armed(pull, now, policy), actions


def _on_final(pull: Pull | None, event: Told, now: Millis, policy: ConsumerPolicy) -> Result:
    final = event.message
    assert isinstance(final, Final)
    if pull is None:
        return None, [Send(event.source, Done(event.key, ok=False))]
    if pull.state is DState.COMMITTING:
        return pull, []
    if final.finish is not None:
        return _first_token_ended(pull, final, final.finish, now, policy)
    pull = _replace(pull, final=final)
    if pull.state is DState.WAITING:
        return pull, []
    return _done_if_complete(pull, now, policy, [])


def _on_load(pull: Pull, event: Load, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.state in _ENDED:
        return pull, []
    fits = len(event.block_ids) >= blocks_for(event.to_token, policy.block_size)
    whole = event.from_token == event.to_token or event.from_token % policy.block_size == 0
    if event.to_token != pull.num_tokens or not (fits and whole):
        message = (
            f"begin_load [{event.from_token}, {event.to_token}) into {len(event.block_ids)} "
            f"blocks does not fit a prompt of {pull.num_tokens} tokens"
        )
        return _fail(pull, FailCause.INTERNAL, message, now, policy)
    pull = _replace(
        pull,
        state=DState.PULLING,
        block_ids=event.block_ids,
        start=event.from_token,
        cut=event.from_token,
    )
    actions: list[Action] = []
    if event.from_token < event.to_token:
        want = Want(pull.key, event.from_token, policy.credits, policy.blocks_per_part)
        actions.append(Send(pull.producer, want))
    return _done_if_complete(pull, now, policy, actions)


def _on_part(pull: Pull | None, event: Told, now: Millis, policy: ConsumerPolicy) -> Result:
    part = event.message
    assert isinstance(part, Part)
    if pull is None:
        return None, [Send(event.source, Done(event.key, ok=False))]
    if not _follows(pull, part, policy):
        return _fail(pull, FailCause.IDENTITY, "PART does not follow the last", now, policy)
    flight = Flight(part.index, part.start, part.stop, part.slot, part.nbytes)
    pull = _replace(pull, cut=part.stop, next_index=part.index + 1, queued=(*pull.queued, flight))
    return _armed(pull, now, policy), []


def _follows(pull: Pull, part: Part, policy: ConsumerPolicy) -> bool:
    """Whether a part is the next one, of whole blocks, within what READY announced and fits."""
    blocks = blocks_for(part.stop, policy.block_size) - part.start // policy.block_size
    return (
        part.index == pull.next_index
        and part.start == pull.cut
        and part.start < part.stop <= pull.upto
        and (part.stop % policy.block_size == 0 or part.stop == pull.num_tokens)
        and 0 < blocks <= policy.blocks_per_part
        and part.nbytes == policy.header_bytes + blocks * policy.block_bytes
    )


def _on_slot(pull: Pull, event: Granted, now: Millis, policy: ConsumerPolicy) -> Result:
    flight = _replace(pull.queued[0], slot=event.slot)
    pull = _replace(pull, queued=pull.queued[1:], reading=(*pull.reading, flight))
    read = Read(
        pull.key, pull.producer, flight.index, flight.remote_slot, event.slot, flight.nbytes
    )
    return _armed(pull, now, policy), [read]


def _taken_out(flights: tuple[Flight, ...], index: int) -> tuple[Flight, tuple[Flight, ...]]:
    found = next((each for each in flights if each.index == index), None)
    assert found is not None, f"part {index} is not on its way"
    return found, tuple(each for each in flights if each is not found)


def _on_read_done(pull: Pull, event: ReadDone, now: Millis, policy: ConsumerPolicy) -> Result:
    flight, reading = _taken_out(pull.reading, event.index)
    assert flight.slot is not None
    pull = _replace(pull, reading=reading, unpacking=(*pull.unpacking, flight))
    first = flight.start // policy.block_size
    unpack = Unpack(
        key=pull.key,
        peer=pull.producer,
        index=flight.index,
        start=flight.start,
        stop=flight.stop,
        slot=flight.slot,
        block_ids=pull.block_ids[first : blocks_for(flight.stop, policy.block_size)],
        nbytes=flight.nbytes,
    )
    taken = Send(pull.producer, Taken(pull.key, flight.index))
    return _armed(pull, now, policy), [taken, unpack]


def _on_read_failed(pull: Pull, event: ReadFailed, now: Millis, policy: ConsumerPolicy) -> Result:
    flight, reading = _taken_out(pull.reading, event.index)
    assert flight.slot is not None
    pull = _replace(pull, reading=reading)
    failed, actions = _fail(pull, event.cause, event.message, now, policy)
    return failed, [Free(flight.slot), *actions]


def _on_unpacked(pull: Pull, event: Unpacked, now: Millis, policy: ConsumerPolicy) -> Result:
    flight, unpacking = _taken_out(pull.unpacking, event.index)
    assert flight.slot is not None
    freed: list[Action] = [Free(flight.slot)]
    pull = _replace(pull, unpacking=unpacking)
    if pull.state is DState.FAILING:
        if unpacking:
            return pull, freed
        return _replace(pull, state=DState.CLOSED), [*freed, Tell(BlocksFree(pull.key))]
    if event.fault is not None:
        failed, actions = _fail(pull, event.fault, event.message, now, policy)
        return failed, freed + actions
    pull = _replace(pull, unpacked=pull.unpacked + flight.stop - flight.start)
    return _done_if_complete(pull, now, policy, freed)


def _on_committed(pull: Pull, _event: Told, now: Millis, policy: ConsumerPolicy) -> Result:
    closed, told = _loaded(pull, now, policy)
    return closed, [told]


def _on_gone(pull: Pull, event: Told, now: Millis, policy: ConsumerPolicy) -> Result:
    gone = event.message
    assert isinstance(gone, Gone)
    if pull.state in _ENDED:
        return pull, []
    return _fail(pull, FailCause.GONE, f"the prefill worker let go: {gone.reason}", now, policy)


def _on_cancel(pull: Pull, _event: Event, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.state in _ENDED:
        return pull, []

    def ending(blocks_free: bool) -> Tell:
        return Tell(Cancelled(pull.key, blocks_free))

    return _close(pull, now, policy, ending, say=True)


def _on_link_lost(pull: Pull, event: LinkLost, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.state in _ENDED:
        return pull, []
    return _fail(pull, FailCause.PEER, event.reason, now, policy, say=False)


def _on_timeout(pull: Pull, _event: Event, now: Millis, policy: ConsumerPolicy) -> Result:
    if pull.state is DState.CLOSED:
        return None, []
    if pull.state is DState.FAILING:
        later = Millis(now + policy.tombstone_ms)
        return _replace(pull, deadline=later), [Count("d:unpack is slow")]
    spent = pull.deadline == pull.budget
    message = "the budget is spent" if spent else f"no progress while {pull.state}"
    return _fail(pull, FailCause.TIMEOUT, message, now, policy)


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
