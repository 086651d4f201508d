"""Shared code of D's handlers: deadlines, endings, completeness. Pure; only for ``consumer``."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.kvtransfer.events import FirstTokenEnded, Loaded
from tandem.kvtransfer.handoff.actions import Action, EmitEvent, Millis, Quarantine, Send
from tandem.kvtransfer.handoff.manifest import available, is_complete
from tandem.kvtransfer.handoff.messages import Done, Final, GoneReason
from tandem.kvtransfer.handoff.pull import ConsumerPolicy, Flight, Pull, UncertainRead
from tandem.kvtransfer.handoff.tables import DState
from tandem.protocol.errors import FailCause
from tandem.protocol.kv import LoadFailed

Result = tuple[Pull | None, list[Action]]

BY_TIME = (GoneReason.UNKNOWN, GoneReason.EXPIRED)
"""Reasons of P after its own deadline. After D's budget they are not P's fault: D may have checked
its clock late."""

_replace = msgspec.structs.replace


def armed(pull: Pull, now: Millis, policy: ConsumerPolicy) -> Pull:
    """Return the pull with its next deadline: its budget, or earlier while P or the transport must
    make progress."""
    deadline = pull.budget
    if pull.state is DState.COMMITTING:
        deadline = min(deadline, Millis(now + policy.commit_ms))
    elif pull.state is DState.PULLING and is_due(pull, policy):
        deadline = min(deadline, Millis(now + policy.transfer_ms))
    return pull if deadline == pull.deadline else _replace(pull, deadline=deadline)


def is_due(pull: Pull, policy: ConsumerPolicy) -> bool:
    """Return whether P or the transport owes announced parts, or FINAL after the last."""
    assert pull.start is not None
    if pull.num_tokens is None or pull.upto == pull.num_tokens:
        return True
    size = (pull.form or policy).block_size
    for item in pull.items:  # a loop, as this runs for each part
        upto = available(item, pull.upto, pull.num_tokens, size)
        if pull.reached[item.group] < upto:
            return True
    return False


def close(
    pull: Pull,
    now: Millis,
    policy: ConsumerPolicy,
    ending: Callable[[bool], EmitEvent],
    *,
    say: bool,
) -> Result:
    """End without success: abandon the key, quarantine slots being read, report to the engine."""
    actions: list[Action] = []
    if say:
        actions.append(Send(pull.producer, Done(pull.key, ok=False)))
    copying, unread = _given_up(pull)
    actions += unread
    blocks_free = not (pull.unpacking or copying)
    actions.append(ending(blocks_free))
    closed = _replace(
        pull,
        state=DState.CLOSED if blocks_free else DState.FAILING,
        queued=(),
        reading=copying,
        deadline=Millis(now + policy.tombstone_ms),
    )
    return closed, actions


def _given_up(pull: Pull) -> tuple[tuple[Flight, ...], list[Action]]:
    copying = tuple(each for each in pull.reading if each.slot is None)
    return copying, [Quarantine(each.slot) for each in pull.reading if each.slot is not None]


def fail(
    pull: Pull,
    cause: FailCause,
    message: str,
    now: Millis,
    policy: ConsumerPolicy,
    *,
    say: bool = True,
) -> Result:
    """End by a fault."""

    def ending(blocks_free: bool) -> EmitEvent:
        return EmitEvent(LoadFailed(pull.key, cause, message, blocks_free))

    return close(pull, now, policy, ending, say=say)


def doubted(pull: Pull, doubt: UncertainRead, now: Millis, policy: ConsumerPolicy) -> Result:
    """Fail the pull without using the data. P's answer about its lease decides whether the link is
    at fault."""
    done = Send(pull.producer, Done(pull.key, ok=False))
    copying, unread = _given_up(pull)
    doubted = _replace(
        pull,
        state=DState.FAILING,
        queued=(),
        reading=copying,
        doubt=doubt,
        deadline=min(pull.budget, Millis(now + policy.commit_ms)),
    )
    return doubted, [done, *unread]


def settled(
    pull: Pull, told: Callable[[bool], EmitEvent], now: Millis, policy: ConsumerPolicy
) -> Result:
    """Report the ending after P's answer; blocks are free after the last copy."""
    free = not (pull.reading or pull.unpacking)
    settled = _replace(
        pull,
        state=DState.CLOSED if free else DState.FAILING,
        doubt=None,
        deadline=Millis(now + policy.tombstone_ms),
    )
    return settled, [told(free)]


def first_token_ended(
    pull: Pull, final: Final, finish: str, now: Millis, policy: ConsumerPolicy
) -> Result:
    """End because token 1 was the last: no KV is needed."""

    def ending(blocks_free: bool) -> EmitEvent:
        return EmitEvent(FirstTokenEnded(pull.key, final.first, finish, blocks_free))

    return close(pull, now, policy, ending, say=True)


def loaded(pull: Pull, now: Millis, policy: ConsumerPolicy) -> tuple[Pull, EmitEvent]:
    """End well."""
    assert pull.final is not None
    closed = _replace(pull, state=DState.CLOSED, deadline=Millis(now + policy.tombstone_ms))
    return closed, EmitEvent(Loaded(pull.key, pull.final.first))


def done_if_complete(
    pull: Pull, now: Millis, policy: ConsumerPolicy, actions: list[Action]
) -> Result:
    """Commit or load a PULLING pull if it is complete, else set its deadline again."""
    assert pull.start is not None
    if pull.final is not None and pull.num_tokens is not None:
        if pull.start == pull.num_tokens:
            closed, told = loaded(pull, now, policy)
            return closed, [*actions, Send(pull.producer, Done(pull.key, ok=False)), told]
        if is_complete(pull.items, pull.reached):
            if pull.direct:  # each tag matched right after its copy, so P is not asked
                closed, told = loaded(pull, now, policy)
                return closed, [*actions, told, Send(pull.producer, Done(pull.key, ok=True))]
            committing = _replace(pull, state=DState.COMMITTING)
            actions.append(Send(pull.producer, Done(pull.key, ok=True)))
            return armed(committing, now, policy), actions
    return armed(pull, now, policy), actions
