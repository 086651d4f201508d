"""The failure ladder: what each failure rules out, and when it is over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.builders import STRICT, inc, view

from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import FailCause, Refusal, RefusalCode
from tandem.router.dispatch.failure import AttemptFailure
from tandem.router.dispatch.ladder import Ladder, Rung, rung_of
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


def place(ladder: Ladder):
    return STRICT.place(PromptFacts(num_tokens=100), FLEET, ladder.exclusions)


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
    ladder = Ladder(3)
    first = place(ladder)
    ladder.record(failed(cause))
    second = place(ladder)
    ladder.record(failed(cause, pair=(P2, D1)))
    third = place(ladder)

    assert (first.prefill, first.worker) == (P1, D1)
    assert (second.prefill, second.worker) == (P2, D1)
    assert (third.prefill, third.worker) == (None, D1)
    assert [rung_of(None, first), rung_of(first, second), rung_of(second, third)] == [
        Rung.FIRST,
        Rung.ANOTHER_PREFILL,
        Rung.LOCAL_PREFILL,
    ]
    ladder.record(failed(cause, pair=None))
    assert ladder.exhausted


@pytest.mark.parametrize(
    "cause", [FailCause.WORKER_LOST, FailCause.INTERNAL, FailCause.CAPACITY, FailCause.DRAINING]
)
def test_a_workers_own_fault(cause: FailCause) -> None:
    """The worker is not asked again, whichever part it had."""
    ladder = Ladder(3)
    before = place(ladder)
    ladder.record(failed(cause))
    after = place(ladder)

    assert after.worker == D2
    assert rung_of(before, after) is Rung.ANOTHER_DECODE
    ladder = Ladder(3)
    ladder.record(failed(cause, worker=P1))
    assert (place(ladder).prefill, place(ladder).worker) == (P2, D1)


def test_the_last_attempt_does_not_hand_off() -> None:
    """Two workers were lost: the third attempt takes the surest way."""
    ladder = Ladder(3)
    ladder.record(failed(FailCause.WORKER_LOST, worker=P1))
    ladder.record(failed(FailCause.WORKER_LOST, worker=D1))

    assert (place(ladder).prefill, place(ladder).worker) == (None, D2)


def test_what_brought_the_answer_on_is_counted_apart() -> None:
    """An answer that is begun goes on through three faults at once, and no request for ever."""
    ladder = Ladder(3)
    ladder.record(failed(FailCause.WORKER_LOST, worker=P1, brought_on=True))
    ladder.record(failed(FailCause.PEER, pair=(P2, D1)))
    assert not ladder.exclusions.no_handoff
    ladder.record(failed(FailCause.WORKER_LOST))
    assert not ladder.exhausted
    assert (place(ladder).prefill, place(ladder).worker) == (None, D2)
    ladder.record(failed(FailCause.WORKER_LOST, worker=D2, pair=None))
    assert ladder.exhausted

    ladder = Ladder(3)
    for number in range(10):
        ladder.record(failed(FailCause.WORKER_LOST, worker=inc(10 + number), brought_on=True))
        assert not ladder.exhausted
    assert ladder.exclusions.no_handoff
    ladder.record(failed(FailCause.WORKER_LOST, worker=inc(20), brought_on=True))
    assert ladder.exhausted


def test_one_attempt_is_one_attempt() -> None:
    """Whoever wants no second one has none of an answer that is begun either."""
    ladder = Ladder(1)
    ladder.record(failed(FailCause.WORKER_LOST, brought_on=True))
    assert ladder.exhausted


def test_what_was_not_sent_is_no_attempt() -> None:
    """A worker whose link was down did nothing; as of refusals, there is an end of it."""
    ladder = Ladder(1)
    for number in range(7):
        lost = failed(FailCause.WORKER_LOST, worker=inc(10 + number), unsent=True)
        ladder.record(lost)
        assert not ladder.exhausted
    ladder.record(failed(FailCause.WORKER_LOST, worker=inc(9), unsent=True))
    assert ladder.exhausted


@pytest.mark.parametrize("code", [RefusalCode.PEER_UNKNOWN, RefusalCode.FINGERPRINT])
def test_refusals_between_p_and_d(code: RefusalCode) -> None:
    """Only the pair is ruled out."""
    ladder = Ladder(3)
    ladder.record(refused(code))
    after = place(ladder)

    assert (after.prefill, after.worker) != (P1, D1)
    assert ladder.exclusions.workers == frozenset()


@pytest.mark.parametrize("code", [RefusalCode.CAPACITY, RefusalCode.DRAINING])
def test_refusals_are_no_attempts(code: RefusalCode) -> None:
    """They rule the worker out, cost no attempt, and are bounded all the same."""
    ladder = Ladder(1)
    for number in range(7):
        ladder.record(refused(code, worker=inc(10 + number)))
        assert not ladder.exhausted
    ladder.record(refused(code, worker=inc(9)))

    assert ladder.exhausted
    assert ladder.only_capacity
    assert ladder.num_failed == 0


def test_non_retryable_and_unsupported() -> None:
    """What every worker would say, and what all of them said."""
    ladder = Ladder(3)
    ladder.record(refused(RefusalCode.UNSUPPORTED, pair=None))
    assert ladder.non_retryable is None
    assert ladder.unsupported is not None
    ladder.record(refused(RefusalCode.INVALID))
    assert ladder.non_retryable is not None
    assert ladder.unsupported is None
    assert not ladder.only_capacity


def test_duplicate_may_go_to_the_same_worker() -> None:
    """A new attempt is a new key."""
    ladder = Ladder(3)
    before = place(ladder)
    ladder.record(refused(RefusalCode.DUPLICATE))

    assert rung_of(before, place(ladder)) is Rung.SAME


def test_reasons_are_told_in_order() -> None:
    ladder = Ladder(3)
    ladder.record(refused(RefusalCode.CAPACITY))
    ladder.record(failed(FailCause.GONE))

    assert ladder.reasons == ("w refused (capacity): m", "w failed (gone): m")


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
    ladder = Ladder(3)
    seen = set()
    for cause, at_prefill in steps:
        placement = place(ladder)
        if placement is None:
            break
        where = (placement.prefill, placement.worker)
        assert where not in seen
        seen.add(where)
        worker = placement.prefill if at_prefill and placement.prefill else placement.worker
        ladder.record(failed(cause, worker=worker, pair=placement.pair))

    assert len(seen) <= 3
    assert ladder.exhausted or place(ladder) is None


def test_whoever_was_full_or_asleep_may_be_asked_again() -> None:
    ladder = Ladder(3)
    ladder.record(failed(FailCause.WORKER_LOST, worker=D1, pair=None))
    for code in (RefusalCode.CAPACITY, RefusalCode.ASLEEP):
        ladder.record(refused(code, worker=D2, pair=None))
    ladder.record(refused(RefusalCode.DRAINING, worker=P1, pair=None))
    assert ladder.exclusions.workers == {D1, D2, P1}
    ladder.ask_again()
    assert ladder.exclusions.workers == {D1, P1}
    assert [each.word for each in ladder.failures] == ["worker_lost", "draining"]
    assert ladder.num_failed == 1


@pytest.mark.parametrize(("last", "said"), [("asleep", True), ("capacity", False)])
def test_what_sleeps_is_told_from_what_is_full(last: str, said: bool) -> None:
    """All that was asked must have said so."""
    ladder = Ladder(3)
    assert not ladder.only_asleep
    ladder.record(failed(FailCause.ASLEEP, worker=D1, pair=None))
    ladder.record(refused(RefusalCode(last), worker=D2, pair=None))
    assert ladder.only_asleep == said
