"""What breaks a hand-off, one test a hole; the numbers are those of the protocol's list.

16, 20, 21 and 24 are tested by that name in tests/workers and tests/engine_plan, where engines and
routers are; 11 needs several ranks, 12 and 13 GPUs, 25 draft layers. Sequences run on the tables in
virtual time; where threads or bytes matter, on real services.
"""

import time

import pytest
from tests.kvtransfer import builders
from tests.kvtransfer.builders import Consumer, Producer, Switch, make_config
from tests.kvtransfer.machines import LEASE_MS, TOKEN, Face, make_key

from tandem.kvtransfer import events
from tandem.kvtransfer.control.session import Liveness, Session
from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import pull as d
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import (
    Beat,
    Done,
    Final,
    FirstToken,
    Gone,
    GoneReason,
    Open,
    Part,
    Ready,
)
from tandem.kvtransfer.handoff.tables import DState, PState
from tandem.kvtransfer.service.quota import Quota
from tandem.kvtransfer.transports.memory import MemoryTransport
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.ids import Incarnation
from tandem.protocol.link import read_header

A = make_key("a")


def _reading(face: Face, num_tokens: int = 4) -> None:
    """Up to the first read under way."""
    face.admit(A, num_tokens)
    face.open(A)
    face.flow()
    face.compute(A, num_tokens)
    face.flow()
    face.load(A, num_tokens)
    while face.to_p:
        face.deliver_p(face.to_p.pop(0))
    for pack in face.packs:
        face.p(p.Packed(pack.key, pack.index, ok=True))
    face.packs.clear()
    while face.to_d:
        face.deliver_d(face.to_d.pop(0))
    assert face.reads


def test_hole_01_a_failure_is_told_with_its_cause_and_nothing_is_loaded():
    """D never goes on by itself: one ending, with the cause, for the router to act on."""
    face = Face()
    _reading(face)
    face.break_link()
    endings = [each for each in face.d_told if not isinstance(each, events.Ready)]
    assert endings == [events.LoadFailed(A, FailCause.PEER, "lost")]


def test_hole_02_blocks_come_back_only_when_the_unpack_has_ended():
    """A cancel during an unpack keeps the blocks from the pool until nothing writes them."""
    face = Face()
    _reading(face)
    face.read_done(face.reads.pop())
    face.d(d.Cancel(A))
    assert face.d_told[-1] == events.Cancelled(A, blocks_free=False)
    face.d(d.Unpacked(A, face.unpacks.pop().index))
    assert face.d_told[-1] == events.BlocksFree(A)


def test_hole_03_nothing_is_announced_before_the_fence(pair):
    """READY waits for the event behind the KV, however long the chunk was launched ago."""
    producer, consumer = pair
    key, fence = make_key("hole3"), Switch()
    assert producer.admit(key, 4, consumer.incarnation) is None
    consumer.open(key, producer.incarnation)
    producer.service.computed(key, [0], 4, fence)
    producer.service.final(key, [FirstToken(0, 1)], None)
    time.sleep(0.1)
    consumer.collect()
    assert consumer.seen == []
    fence.is_done = True
    consumer.wait_for(events.Ready, key)


def test_hole_04_a_successor_at_the_same_address_answers_reset(workers):
    """A consumer of the old process fails its keys at once and links to the new one."""
    old, consumer = workers(Producer), workers(Consumer)
    consumer.meet(old)
    key = make_key("hole4")
    consumer.open(key, old.incarnation)
    port = int(old.service.control.rpartition(":")[2])
    old.service.close()
    new = workers(Producer, make_config(kv_control_port=port))
    failed = consumer.wait_for(events.LoadFailed, key)
    assert failed.cause is FailCause.PEER
    consumer.until(lambda: consumer.service.peer_up(new.incarnation))
    assert not consumer.service.peer_up(old.incarnation)


def test_hole_04_frames_for_another_incarnation_end_the_session():
    """Neither a frame for a predecessor nor one from a successor is delivered."""
    one, two, three = (Incarnation(bytes([n]) * 16) for n in (1, 2, 3))
    p_end, d_end = Session(one), Session(two)
    assert p_end.accept(read_header(d_end.seal()))
    assert d_end.accept(read_header(p_end.seal()))
    successor = Session(three)
    assert not successor.accept(read_header(d_end.seal()))
    successor = Session(three)
    successor.link.peer = two
    assert not d_end.accept(read_header(successor.seal()))


def test_hole_04_a_gap_ends_the_session():
    """A lost frame is noticed by the next one, a beat at the latest."""
    one, two = (Incarnation(bytes([n]) * 16) for n in (1, 2))
    p_end, d_end = Session(one), Session(two)
    assert p_end.accept(read_header(d_end.seal()))
    d_end.seal()
    assert not p_end.accept(read_header(d_end.seal()))


def test_hole_05_a_revoked_attempt_is_never_leased_again():
    """A forced revoke is final: later DONEs and admissions of the key get nothing."""
    face = Face()
    face.admit(A, 4)
    face.compute(A, 4)
    face.p(p.Revoke(A))
    face.p(p.Finished(A, cancelled=False))
    face.admit(A, 4)
    assert face.exports.exports[A].state is PState.GONE
    face.deliver_p(Done(A, ok=True))
    assert face.to_d[-1] == Gone(A, GoneReason.REVOKED)


def test_hole_06_new_weights_end_every_lease_first(pair):
    """After a revoke no consumer gets a commit, and the engine hears of it."""
    producer, consumer = pair
    key = make_key("hole6")
    assert producer.admit(key, 4, consumer.incarnation) is None
    consumer.open(key, producer.incarnation)
    producer.compute(key, 4, [0])
    consumer.wait_for(events.Ready, key)
    producer.service.revoke_all()
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.GONE
    assert producer.wait_for(events.Revoked, key).cause is FailCause.REVOKED
    producer.service.finished(key)
    producer.wait_for(events.Released, key)
    assert not producer.service.has_pending()


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
    assert face.to_d == [Ready(A, 8, 8, 0), Final(A, TOKEN)]


def test_hole_08_the_lease_ends_at_the_smaller_of_cap_and_budget():
    """Nobody keeps P's blocks beyond it."""
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


def test_hole_10_a_peer_that_beats_but_stands_still_with_work_is_lost():
    """Beats of a thread beside a dead engine keep nothing alive."""
    life = Liveness(Millis(0), silent_ms=1000, stalled_ms=5000)
    for now in range(0, 20_000, 500):
        life.heard(Millis(now))
        life.beat(Beat(7, 3, has_work=now > 10_000), Millis(now))
        if now <= 15_000:
            assert life.fault(Millis(now)) is None
    assert "stands still" in (life.fault(Millis(19_500)) or "")
    assert "silent" in (life.fault(Millis(30_000)) or "")


def test_hole_10_an_idle_peer_need_not_move():
    """No work, no progress, no fault."""
    life = Liveness(Millis(0), silent_ms=1000, stalled_ms=5000)
    for now in range(0, 60_000, 500):
        life.heard(Millis(now))
        life.beat(Beat(7, 3, has_work=False), Millis(now))
        assert life.fault(Millis(now)) is None


def test_hole_14_hanging_reads_are_capped_and_then_reported(workers):
    """A producer's hanging reads keep their slots in quarantine; above half of all the worker
    asks to be replaced, and when the reads land the slots are used again."""
    config = make_config(kv_connector="memory", kv_receive_slots=3, kv_slots_per_peer=2)
    producer = workers(Producer, config)
    transport = MemoryTransport()
    consumer = workers(Consumer, config, transports={"memory": transport})
    consumer.meet(producer)
    transport.hold.set()
    keys = [make_key(f"hang{n}") for n in range(3)]
    for n, key in enumerate(keys):
        consumer.open(key, producer.incarnation)
        producer.hand_over(key, 4, [n], consumer.incarnation)
        consumer.load(key, [20 + n])
    ring = consumer.service._mover.table.ring
    consumer.until(lambda: ring.free == 1)
    for key in keys:
        consumer.service.cancel(key)
        consumer.wait_for(events.Cancelled, key)
    assert ring.quarantined == 2
    assert "receive slots" in (consumer.service.problem() or "")
    transport.hold.clear()
    consumer.until(lambda: ring.free == 3)
    assert consumer.service.problem() is None


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
    for message in (Ready(A, 4, 4, 0), Final(A, TOKEN), Part(A, 0, 0, 4, 0, 110)):
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
    consumer.slab[30] = 7
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [30, 31, 32], hit=4)
    consumer.wait_for(events.Loaded, key)
    assert bool((consumer.slab[30] == 7).all())
    assert bool((consumer.slab[[31, 32]] == builders.kv_of("hole17", 12)[1:]).all())


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


def test_hole_19_token_1_reaches_the_consumer_with_the_kv(pair):
    """D's first frame can repeat it: Loaded carries what P drew."""
    producer, consumer = pair
    key = make_key("hole19")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [1])
    assert consumer.wait_for(events.Loaded, key).first == (FirstToken(0, 42),)


@pytest.mark.parametrize("loading", [False, True], ids=["before", "while loading"])
def test_hole_22_a_request_that_token_1_ended_is_abandoned(loading):
    """D learns the token, takes no KV, and P's blocks are free."""
    face = Face()
    face.admit(A, 8)
    face.open(A)
    face.flow()
    face.compute(A, 8)
    face.flow()
    if loading:
        face.load(A, 8)
    face.end(A, finish="stop")
    face.flow()
    assert face.d_told[-1] == events.FirstTokenEnded(A, TOKEN, "stop")
    assert face.p_told == [events.Released(A)]
    assert face.is_free()


def test_hole_23_one_hand_off_carries_token_1_of_every_choice():
    """n choices share the prompt's KV."""
    first = tuple(FirstToken(choice, 7 * choice) for choice in range(3))
    face = Face()
    face.admit(A, 4)
    face.open(A)
    face.flow()
    face.compute(A, 4)
    face.p(p.First(A, first, None))
    face.flow()
    face.load(A, 4)
    face.flow()
    assert face.d_told[-1] == events.Loaded(A, first)


def test_hole_26_clocks_are_never_compared():
    """An end whose clock runs an hour ahead hands over all the same: only what is left travels."""
    face = Face()
    face.now = Millis(3_600_000)
    face.admit(A, 4, budget_ms=1000)
    face.now = Millis(5)
    face.open(A, budget_ms=1000)
    assert face.to_p == [Open(A, 1000)]
    assert face.imports.pulls[A].deadline == 1005
    assert face.exports.exports[A].deadline == 3_601_000


def test_hole_27_cancels_and_refusals_never_count_against_a_link(pair):
    """Only what the link did wrong may close it."""
    producer, consumer = pair
    for n in range(5):
        key = make_key(f"cancel{n}")
        consumer.open(key, producer.incarnation)
        consumer.service.cancel(key)
        consumer.wait_for(events.Cancelled, key)
    consumer.open(make_key("never"), producer.incarnation, budget_ms=50)
    consumer.wait_for(events.LoadFailed, make_key("never"))
    assert consumer.service.peer_up(producer.incarnation)


@pytest.mark.parametrize("spoilt", ["payload", "header"])
def test_hole_27_one_wrong_digest_or_identity_quarantines_the_link(workers, spoilt):
    """Wrong bytes are never unpacked into use, and no other request is risked on that link."""
    config = make_config(kv_connector="memory", kv_quarantine_seconds=0.5)
    producer = workers(Producer, config)
    transport = MemoryTransport()
    consumer = workers(Consumer, config, transports={"memory": transport})
    consumer.meet(producer)
    transport.hold.set()
    key = make_key(spoilt)
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [1])
    consumer.until(lambda: transport._reads)
    memory = producer.service._mover.memory
    for slot in range(memory.count):
        memory.rows[slot, 300 if spoilt == "payload" else 20] += 1
    transport.hold.clear()
    cause = FailCause.DIGEST if spoilt == "payload" else FailCause.IDENTITY
    assert consumer.wait_for(events.LoadFailed, key).cause is cause
    assert bool((consumer.slab[1] == 0).all())
    consumer.until(lambda: not consumer.service.peer_up(producer.incarnation))
    assert "quarantined" in consumer.service.why_down(producer.incarnation)


def test_hole_28_a_link_is_up_only_when_the_pattern_has_arrived(workers):
    """No user's request is the probe: a link that delivers wrong bytes never comes up."""
    config = make_config(kv_connector="memory")
    producer = workers(Producer, config)
    memory = producer.service._mover.memory
    memory.rows[memory.count - 1, 100] += 1
    consumer = workers(Consumer, config)
    consumer.service.set_peers([producer.service.control])
    consumer.until(lambda: consumer.service.peer_health())
    consumer.until(lambda: "pattern" in consumer.service.why_down(producer.incarnation))
    assert not consumer.service.peer_up(producer.incarnation)
    memory.rows[memory.count - 1, 100] -= 1
    consumer.until(lambda: consumer.service.peer_up(producer.incarnation))


def test_hole_29_without_the_secret_or_the_fingerprint_there_is_no_link(workers):
    """HELLO is checked before anything is told."""
    producer = workers(Producer, make_config(kv_secret="of this service"))
    other = builders.FINGERPRINT.__class__(
        revision="another", dtype="float32", layout=builders.LAYOUT
    )
    stranger = workers(Consumer, make_config(kv_secret="guessed"))
    elsewhere = workers(Consumer, make_config(kv_secret="of this service"), fingerprint=other)
    friend = workers(Consumer, make_config(kv_secret="of this service"))
    for consumer in (stranger, elsewhere):
        consumer.service.set_peers([producer.service.control])
    friend.meet(producer)
    producer.until(lambda: producer.metric("tandem:kv_links_refused_total") >= 2)
    assert producer.service.consumers() == {friend.incarnation}
    assert stranger.service.peer_health() == elsewhere.service.peer_health() == ()


def test_hole_29_a_part_names_a_slot_that_exists(pair):
    """A slot number out of P's range is an identity fault, not a read."""
    producer, consumer = pair
    key = make_key("hole29")
    consumer.open(key, producer.incarnation)
    assert producer.admit(key, 4, consumer.incarnation) is None
    producer.compute(key, 4, [0])
    consumer.wait_for(events.Ready, key)
    mover = consumer.service._mover
    nbytes = 256 + builders.LAYOUT.block_bytes
    wild = Part(key, 0, 0, 4, 10_000, nbytes)
    say = producer.service._mover.say
    producer.service._mover.say = lambda peer, message: say(
        peer, wild if isinstance(message, Part) else message
    )
    consumer.load(key, [1])
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.IDENTITY
    assert mover.table.pulls[key].state is DState.CLOSED
