"""What breaks a hand-off, one test a hole; the numbers are those of the protocol's list.

16, 20, 21 and 24 are tested by that name in tests/workers and tests/engine_plan, where engines and
routers are; 11 needs several ranks, 12 and 13 GPUs, 25 draft layers. Sequences run on the tables in
virtual time; where threads or bytes matter, on real services.
"""

import time

from tests.kvtransfer.builders import Consumer, Producer, Switch, make_config, only
from tests.kvtransfer.machines import A, Face, make_key
from tests.own_ports import own_ports

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import pull as d
from tandem.kvtransfer.handoff.messages import Done, Gone, GoneReason, Taken
from tandem.kvtransfer.handoff.tables import PState
from tandem.link.liveness import LinkTimes
from tandem.link.session import Session, Terms, Verdict
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import Incarnation
from tandem.protocol.kv import FirstToken
from tandem.protocol.link import read_header
from tandem.protocol.messages import Beat, Welcome


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
    assert face.d_told[-1] == events.Released(A)


def test_hole_03_nothing_is_announced_before_the_fence(pair):
    """READY names no token before the event behind its KV, however long ago the chunk was launched:
    D reserves meanwhile, and reads nothing."""
    producer, consumer = pair
    key, fence = make_key("hole3"), Switch()
    assert producer.admit(key, 4, consumer.incarnation) is None
    consumer.open(key, producer.incarnation)
    producer.service.started(key)
    producer.service.computed(key, only([0]), 4, fence)
    producer.service.final(key, [FirstToken(0, 1)], None)
    consumer.load(key, [5])
    time.sleep(0.1)
    consumer.collect()
    assert [type(each) for each in consumer.seen] == [events.Ready]
    assert consumer.metric("tandem:kv_handoff_bytes_total", role="consumer") == 0
    fence.is_done = True
    consumer.wait_for(events.Loaded, key)


def test_hole_04_a_successor_at_the_same_address_answers_reset(workers):
    """A consumer of the old process fails its keys at once and links to the new one; of who is gone
    it tells nobody any more, once routers have named who is there."""
    config = make_config(kv_control_port=own_ports(1)[0])  # nobody takes it between the two
    old, consumer = workers(Producer, config), workers(Consumer)
    consumer.meet(old)
    key = make_key("hole4")
    consumer.open(key, old.incarnation)
    old.service.close()
    new = workers(Producer, config)
    failed = consumer.wait_for(events.LoadFailed, key)
    assert failed.cause is FailCause.PEER
    consumer.until(lambda: consumer.service.peer_up(new.incarnation))
    assert not consumer.service.peer_up(old.incarnation)
    consumer.service.set_peers({new.service.control: new.incarnation})
    (left,) = consumer.service.peer_health()
    assert (left.peer, left.up) == (new.incarnation, True)
    consumer.service.set_peers({})
    consumer.until(lambda: not consumer.service.peer_health())


def linked(p_end: Session, d_end: Session) -> None:
    head = read_header(d_end.greet(0.0))
    assert p_end.answer(head, d_end.terms.hello()) is None
    assert d_end.take(read_header(p_end.seal()), Welcome("card"), 0.0) is Verdict.UP


def ends(count: int) -> list[Session]:
    ids = (Incarnation(bytes([n + 1]) * 16) for n in range(count))
    return [Session(Terms(each, "hand-off", 1, LinkTimes())) for each in ids]


def test_hole_04_frames_for_another_incarnation_end_the_session():
    """Neither a frame for a predecessor nor one from a successor is delivered."""
    p_end, d_end, successor, other = ends(4)
    linked(p_end, d_end)
    linked(successor, other)
    taken = Taken(A, 0)
    assert successor.take(read_header(d_end.seal()), taken, 0.0) is Verdict.BROKEN
    successor.peer = d_end.me
    assert d_end.take(read_header(successor.seal()), taken, 0.0) is Verdict.BROKEN


def test_hole_04_a_gap_ends_the_session():
    """A lost frame is noticed by the next one, a beat at the latest."""
    p_end, d_end = ends(2)
    linked(p_end, d_end)
    d_end.seal()
    assert p_end.take(read_header(d_end.seal()), Beat(), 0.0) is Verdict.BROKEN


def test_hole_05_an_attempt_that_ended_is_never_leased_again():
    """An end is final: later DONEs and admissions of the key get nothing."""
    face = Face()
    face.admit(A, 4)
    face.compute(A, 4)
    face.p(p.Cancel(A))
    face.p(p.Finished(A, cancelled=False))
    face.admit(A, 4)
    assert face.exports.exports[A].state is PState.GONE
    face.deliver_p(Done(A, ok=True))
    assert face.to_d[-1] == Gone(A, GoneReason.CANCELLED)
