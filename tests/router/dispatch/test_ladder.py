"""The failure ladder: what each failure rules out, and when it is over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.builders import STRICT, inc, view

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import FailCause, Refusal, RefusalCode
from tandem.router.dispatch.retry_policy import (
    AttemptFailure,
    AttemptKind,
    RetryPolicy,
    kind_of_attempt,
)
from tandem.router.placement.snapshot import FleetSnapshot, PromptFacts

P1, P2, D1, D2 = inc(1), inc(2), inc(3), inc(4)
FLEET = FleetSnapshot(
    (
        view(1, WorkerRole.PREFILL),
        view(2, WorkerRole.PREFILL),
        view(3, WorkerRole.DECODE),
        view(4, WorkerRole.DECODE),
    ),
    frozenset((p, d) for p in (P1, P2) for d in (D1, D2)),
)


def failed(cause: FailCause, worker=D1, pair=(P1, D1), **fields) -> AttemptFailure:
    return AttemptFailure(
        worker=worker, worker_name="w", pair=pair, message="m", cause=cause, **fields
    )


def refused(code: RefusalCode, worker=D1, pair=(P1, D1)) -> AttemptFailure:
    refusal = Refusal(code=code, message="m")
    return AttemptFailure(worker=worker, worker_name="w", pair=pair, message="m", refusal=refusal)


def place(retry_policy: RetryPolicy):
    return STRICT.place(PromptFacts(num_tokens=100), FLEET, retry_policy.exclusions)


@pytest.mark.parametrize(
    "cause",
    [
        FailCause.PEER,
        FailCause.TIMEOUT,
        FailCause.GONE,
        FailCause.DIGEST,
        FailCause.IDENTITY,
    ],
)
def test_between_p_and_d(cause: FailCause) -> None:
    """The fault of a pair: another P for the same D, then D alone."""
    retry_policy = RetryPolicy(3)
    first = place(retry_policy)
    retry_policy.record(failed(cause))
    second = place(retry_policy)
    retry_policy.record(failed(cause, pair=(P2, D1)))
    third = place(retry_policy)

    assert (first.prefill, first.worker) == (P1, D1)
    assert (second.prefill, second.worker) == (P2, D1)
    assert (third.prefill, third.worker) == (None, D1)
    assert [
        kind_of_attempt(None, first),
        kind_of_attempt(first, second),
        kind_of_attempt(second, third),
    ] == [
        AttemptKind.FIRST,
        AttemptKind.ANOTHER_PREFILL,
        AttemptKind.LOCAL_PREFILL,
    ]
    retry_policy.record(failed(cause, pair=None))
    assert retry_policy.exhausted


@pytest.mark.parametrize(
    "cause", [FailCause.WORKER_LOST, FailCause.INTERNAL, FailCause.CAPACITY, FailCause.DRAINING]
)
def test_a_workers_own_fault(cause: FailCause) -> None:
    """The worker is not asked again, whichever part it had."""
    retry_policy = RetryPolicy(3)
    before = place(retry_policy)
    retry_policy.record(failed(cause))
    after = place(retry_policy)

    assert after.worker == D2
    assert kind_of_attempt(before, after) is AttemptKind.ANOTHER_DECODE
    retry_policy = RetryPolicy(3)
    retry_policy.record(failed(cause, worker=P1))
    assert (place(retry_policy).prefill, place(retry_policy).worker) == (P2, D1)


def test_the_last_attempt_does_not_hand_off() -> None:
    """Two workers were lost: the third attempt takes the surest way."""
    retry_policy = RetryPolicy(3)
    retry_policy.record(failed(FailCause.WORKER_LOST, worker=P1))
    retry_policy.record(failed(FailCause.WORKER_LOST, worker=D1))

    assert (place(retry_policy).prefill, place(retry_policy).worker) == (None, D2)


def test_what_brought_the_answer_on_is_counted_apart() -> None:
    """An answer that is begun goes on through three faults at once, and no request for ever."""
    retry_policy = RetryPolicy(3)
    retry_policy.record(failed(FailCause.WORKER_LOST, worker=P1, brought_on=True))
    retry_policy.record(failed(FailCause.PEER, pair=(P2, D1)))
    assert not retry_policy.exclusions.no_handoff
    retry_policy.record(failed(FailCause.WORKER_LOST))
    assert not retry_policy.exhausted
    assert (place(retry_policy).prefill, place(retry_policy).worker) == (None, D2)
    retry_policy.record(failed(FailCause.WORKER_LOST, worker=D2, pair=None))
    assert retry_policy.exhausted

    retry_policy = RetryPolicy(3)
    for number in range(10):
        retry_policy.record(failed(FailCause.WORKER_LOST, worker=inc(10 + number), brought_on=True))
        assert not retry_policy.exhausted
    assert retry_policy.exclusions.no_handoff
    retry_policy.record(failed(FailCause.WORKER_LOST, worker=inc(20), brought_on=True))
    assert retry_policy.exhausted


def test_one_attempt_is_one_attempt() -> None:
    """Whoever wants no second one has none of an answer that is begun either."""
    retry_policy = RetryPolicy(1)
    retry_policy.record(failed(FailCause.WORKER_LOST, brought_on=True))
    assert retry_policy.exhausted


def test_what_was_not_sent_is_no_attempt() -> None:
    """A worker whose link was down did nothing; as of refusals, there is an end of it."""
    retry_policy = RetryPolicy(1)
    for number in range(7):
        lost = failed(FailCause.WORKER_LOST, worker=inc(10 + number), unsent=True)
        retry_policy.record(lost)
        assert not retry_policy.exhausted
    retry_policy.record(failed(FailCause.WORKER_LOST, worker=inc(9), unsent=True))
    assert retry_policy.exhausted


@pytest.mark.parametrize("code", [RefusalCode.PEER_UNKNOWN, RefusalCode.FINGERPRINT])
def test_refusals_between_p_and_d(code: RefusalCode) -> None:
    """Only the pair is ruled out."""
    retry_policy = RetryPolicy(3)
    retry_policy.record(refused(code))
    after = place(retry_policy)

    assert (after.prefill, after.worker) != (P1, D1)
    assert retry_policy.exclusions.workers == frozenset()


@pytest.mark.parametrize("code", [RefusalCode.CAPACITY, RefusalCode.DRAINING])
def test_refusals_are_no_attempts(code: RefusalCode) -> None:
    """They rule the worker out, cost no attempt, and are bounded all the same."""
    retry_policy = RetryPolicy(1)
    for number in range(7):
        retry_policy.record(refused(code, worker=inc(10 + number)))
        assert not retry_policy.exhausted
    retry_policy.record(refused(code, worker=inc(9)))

    assert retry_policy.exhausted
    assert retry_policy.only_capacity
    assert retry_policy.num_failed == 0


def test_non_retryable_and_unsupported() -> None:
    """What every worker would say, and what all of them said."""
    retry_policy = RetryPolicy(3)
    retry_policy.record(refused(RefusalCode.UNSUPPORTED, pair=None))
    assert retry_policy.non_retryable is None
    assert retry_policy.unsupported is not None
    retry_policy.record(refused(RefusalCode.INVALID))
    assert retry_policy.non_retryable is not None
    assert retry_policy.unsupported is None
    assert not retry_policy.only_capacity


def test_duplicate_may_go_to_the_same_worker() -> None:
    """A new attempt is a new key."""
    retry_policy = RetryPolicy(3)
    before = place(retry_policy)
    retry_policy.record(refused(RefusalCode.DUPLICATE))

    assert kind_of_attempt(before, place(retry_policy)) is AttemptKind.SAME


def test_reasons_are_told_in_order() -> None:
    retry_policy = RetryPolicy(3)
    retry_policy.record(refused(RefusalCode.CAPACITY))
    retry_policy.record(failed(FailCause.GONE))

    assert retry_policy.reasons == ("w refused (capacity): m", "w failed (gone): m")


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([FailCause.PEER, FailCause.WORKER_LOST, FailCause.INTERNAL]),
            st.booleans(),
        ),
        min_size=3,
        max_size=3,
    )
)
def test_no_attempt_is_made_twice(steps) -> None:
    """Whatever fails, the next attempt differs, and there are at most three."""
    retry_policy = RetryPolicy(3)
    seen = set()
    for cause, at_prefill in steps:
        placement = place(retry_policy)
        if placement is None:
            break
        where = (placement.prefill, placement.worker)
        assert where not in seen
        seen.add(where)
        worker = placement.prefill if at_prefill and placement.prefill else placement.worker
        retry_policy.record(failed(cause, worker=worker, pair=placement.pair))

    assert len(seen) <= 3
    assert retry_policy.exhausted or place(retry_policy) is None


def test_whoever_was_full_or_asleep_may_be_asked_again() -> None:
    retry_policy = RetryPolicy(3)
    retry_policy.record(failed(FailCause.WORKER_LOST, worker=D1, pair=None))
    for code in (RefusalCode.CAPACITY, RefusalCode.ASLEEP):
        retry_policy.record(refused(code, worker=D2, pair=None))
    retry_policy.record(refused(RefusalCode.DRAINING, worker=P1, pair=None))
    assert retry_policy.exclusions.workers == {D1, D2, P1}
    retry_policy.ask_again()
    assert retry_policy.exclusions.workers == {D1, P1}
    assert [each.word for each in retry_policy.failures] == ["worker_lost", "draining"]
    assert retry_policy.num_failed == 1


@pytest.mark.parametrize(("last", "said"), [("asleep", True), ("capacity", False)])
def test_what_sleeps_is_told_from_what_is_full(last: str, said: bool) -> None:
    """All that was asked must have said so."""
    retry_policy = RetryPolicy(3)
    assert not retry_policy.only_asleep
    retry_policy.record(failed(FailCause.ASLEEP, worker=D1, pair=None))
    retry_policy.record(refused(RefusalCode(last), worker=D2, pair=None))
    assert retry_policy.only_asleep == said
