"""Holes 7 to 18, but 14: what makes a hand-off hang or strand its blocks, one test a hole."""

from tests.kvtransfer import builders
from tests.kvtransfer.machines import LEASE_MS, TOKEN, A, Face, make_key, ready

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.messages import (
    Done,
    Final,
    Gone,
    GoneReason,
    Open,
    Part,
)
from tandem.kvtransfer.service.producer import Quota
from tandem.link.liveness import LinkTimes, Liveness
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.messages import Beat


def test_hole_07_done_is_answered_while_the_engine_is_in_a_step(pair):
    """P's engine polls nothing, and the commit comes all the same."""
    producer, consumer = pair
    key = make_key("hole7")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.wait_for(events.Loaded, key)
    assert consumer.holds("hole7", 12, [5, 6, 7])
    assert producer.seen == []


def test_hole_08_a_late_consumer_gets_everything_announced_so_far():
    """P finished long ago; one OPEN brings READY and FINAL."""
    face = Face()
    face.admit(A, 8)
    face.compute(A, 8)
    face.end(A)
    face.after(LEASE_MS - 1)
    face.deliver_p(Open(A, None))
    assert face.to_d == [ready(A, 8, 8), Final(A, TOKEN)]


def test_hole_08_the_lease_ends_at_the_smaller_of_cap_and_budget():
    for budget, cap in ((None, LEASE_MS), (500, 500), (10 * LEASE_MS, LEASE_MS)):
        face = Face()
        face.admit(A, 8, budget_ms=budget)
        face.compute(A, 8)
        face.end(A)
        face.after(cap - 1)
        assert face.p_told == []
        face.after(1)
        assert face.p_told == [events.Released(A)]


def test_hole_09_leases_have_a_quota_and_admission_a_bound():
    """Beyond the quota nothing starts, beyond the backlog nothing is admitted, and what is larger
    than the quota is refused for good."""
    quota = Quota(100, share=0.3, backlog=2.0)
    keys = [make_key(f"k{n}") for n in range(4)]
    assert [quota.admit(key, 20) for key in keys[:3]] == [None] * 3
    refused = quota.admit(keys[3], 20)
    assert refused is not None
    assert refused.code is RefusalCode.CAPACITY
    never = quota.admit(keys[3], 31)
    assert never is not None
    assert never.code is RefusalCode.NEVER_FITS
    assert quota.may_start(keys[0])
    assert not quota.may_start(keys[1])
    quota.release(keys[0])
    assert quota.may_start(keys[1])
    assert quota.num_started == 20


def test_a_large_lease_is_not_passed_by_small_ones_for_ever():
    """Who asks after one that must wait waits, too; in the next round the first asks first."""
    quota = Quota(100, share=0.3, backlog=9.0)
    before, large, after = [make_key(name) for name in ("before", "large", "after")]
    for key, blocks in ((before, 5), (large, 28), (after, 5)):
        assert quota.admit(key, blocks) is None
    assert quota.may_start(before)
    for _ in range(3):
        quota.new_round()
        assert not quota.may_start(large)
        assert not quota.may_start(after)
    quota.new_round()
    assert quota.may_start(after), "who asks first goes first: it may have a better priority"
    quota.release(after)
    quota.release(before)
    assert quota.may_start(large)


def test_hole_10_a_peer_that_beats_but_stands_still_with_work_is_lost():
    """Beats of a thread beside a dead engine keep nothing alive."""
    life = Liveness(LinkTimes(beat_timeout=1.0, stall_timeout=5.0))
    for at in range(0, 40, 1):
        life.received(at / 2)
        life.progress(at / 2, Beat(7, 3, has_work=at > 20))
        if at <= 30:
            assert life.overdue(at / 2) is None
    assert "no progress" in (life.overdue(19.5) or "")
    assert "silent" in (life.overdue(30.0) or "")


def test_hole_10_an_idle_peer_need_not_move():
    """No work, no progress, no fault."""
    life = Liveness(LinkTimes(beat_timeout=1.0, stall_timeout=5.0))
    for at in range(120):
        life.received(at / 2)
        life.progress(at / 2, Beat(7, 3, has_work=False))
        assert life.overdue(at / 2) is None


def test_hole_15_a_cancel_that_comes_first_is_remembered(pair):
    """The request that follows it is refused; a consumer that asks is told."""
    producer, consumer = pair
    key = make_key("hole15")
    producer.service.cancel(key)
    refusal = producer.admit(key, 4, consumer.incarnation)
    assert refusal is not None
    assert "cancelled" in refusal.message
    consumer.open(key, producer.incarnation)
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.GONE


def test_hole_15_unknown_keys_are_answered_so_that_both_ends_can_free():
    """READY, FINAL and PART of an unknown key: DONE(abandon). DONE of one: GONE."""
    face = Face()
    for message in (ready(A, 4, 4), Final(A, TOKEN), Part(A, 0, 0, 4, 0, 110)):
        face.deliver_d(message)
    assert face.to_p == [Done(A, ok=False)] * 3
    for message in face.to_p:
        face.deliver_p(message)
    assert face.to_d == [Gone(A, GoneReason.UNKNOWN)] * 3
    for message in face.to_d:
        face.deliver_d(message)
    assert len(face.to_p) == 3


def test_hole_17_only_what_the_cache_lacks_is_asked_for(pair):
    """Pinned hits are not sent again, and not written."""
    producer, consumer = pair
    key = make_key("hole17")
    consumer.kv_cache[30] = 7
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [30, 31, 32], hit=4)
    consumer.wait_for(events.Loaded, key)
    assert bool((consumer.kv_cache[30] == 7).all())
    assert bool((consumer.kv_cache[[31, 32]] == builders.kv_of("hole17", 12)[1:]).all())


def test_hole_17_a_full_hit_wants_token_1_and_no_commit():
    """DONE(abandon) after FINAL, and D runs at once."""
    face = Face()
    face.admit(A, 8)
    face.open(A)
    face.flow()
    face.compute(A, 8)
    face.flow()
    face.load(A, 8, hit=8)
    face.flow()
    face.end(A)
    face.deliver_d(face.to_d.pop(0))
    assert face.d_told[-1] == events.Loaded(A, TOKEN)
    assert face.to_p == [Done(A, ok=False)]
    face.flow()
    assert face.p_told == [events.Released(A)]


def test_hole_18_a_consumer_may_reserve_late():
    """READYs add up while D's engine has no blocks; one load brings them all."""
    face = Face()
    face.admit(A, 12)
    face.open(A)
    face.flow()
    for upto in (4, 8, 12):
        face.compute(A, upto)
        face.flow()
    face.end(A)
    face.flow()
    assert face.d_told == [events.Ready(A, 12)]
    face.load(A, 12)
    face.flow()
    assert face.d_told[-1] == events.Loaded(A, TOKEN)
