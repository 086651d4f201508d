"""Holes 19 to 29: token 1, clocks and the health of links, one test a hole."""

import pytest
from tests.kvtransfer import builders
from tests.kvtransfer.builders import Consumer, Producer, make_config
from tests.kvtransfer.machines import TOKEN, A, Face, make_key
from tests.kvtransfer.memory_transport import MemoryTransport

from tandem.kvtransfer import events
from tandem.kvtransfer.control.mail import Drop, LinkDown
from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.messages import Open, Part
from tandem.kvtransfer.handoff.tables import DState
from tandem.protocol.errors import FailCause
from tandem.protocol.kv import FirstToken


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
    assert face.d_told[-1] == events.Loaded(A, TOKEN, usable=False)
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
    config = make_config(kv_connector="memory", kv_quarantine_seconds=30.0)
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
    assert bool((consumer.kv_cache[1] == 0).all())
    consumer.until(lambda: not consumer.service.peer_up(producer.incarnation))
    assert "quarantined" in consumer.service.why_down(producer.incarnation)


def test_a_slot_that_is_anothers_since_p_lost_the_link_speaks_against_nobody(workers):
    """P frees the slots of a consumer that it counts as lost and packs them again; one that only
    stood still reads on, and must not take a right link for a wrong one."""
    config = make_config(kv_connector="memory", kv_quarantine_seconds=600.0)
    producer = workers(Producer, config)
    transport = MemoryTransport()
    consumer = workers(Consumer, config, transports={"memory": transport})
    consumer.meet(producer)
    transport.hold.set()
    key, mover = make_key("stopped"), producer.service._mover
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 4, [0], consumer.incarnation)
    consumer.load(key, [1])
    consumer.until(lambda: transport._reads)
    link = mover._links[consumer.incarnation]
    mover.inbox.put(LinkDown(consumer.incarnation, link, "no beat"))
    producer.wait_for(events.Released, key)
    for slot in range(mover.memory.count - 1):  # the last one is the probe's
        mover.memory.rows[slot, 20] += 1
    transport.hold.clear()
    consumer.until(lambda: consumer.service._mover.table.pulls[key].uncertain)
    assert not any(isinstance(each, events.LoadFailed) for each in consumer.seen)
    mover.control.post(Drop(link, "no beat"))
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.PEER
    consumer.until(lambda: consumer.service.peer_up(producer.incarnation))


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


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
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
    say = producer.service._mover.send_message
    producer.service._mover.send_message = lambda peer, message: say(
        peer, wild if isinstance(message, Part) else message
    )
    consumer.load(key, [1])
    assert consumer.wait_for(events.LoadFailed, key).cause is FailCause.IDENTITY
    assert mover.table.pulls[key].state is DState.CLOSED
