"""KV from block to block: tags, and blocks that wait for the last copy into them."""

import msgspec
import pytest
from tests.kvtransfer.builders import FINGERPRINT, LAYOUT, Consumer, Producer, make_config, make_key

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.messages import Part
from tandem.kvtransfer.memory.blocks import CLEARED, BlockTags, tag_of
from tandem.kvtransfer.transports.memory import MemoryTransport
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash
from tandem.protocol.layout import KVGroup, KVKind, KVLayout

KEY, OTHER = make_key("one"), make_key("two")


class Held:
    """A pair whose copies wait for the test."""

    def __init__(self, workers, **config) -> None:
        made = make_config(kv_connector="memory_blocks", **config)
        self.transport = MemoryTransport(direct=True)
        self.producer = workers(Producer, made)
        self.consumer = workers(Consumer, made, transports={"memory_blocks": self.transport})
        self.consumer.meet(self.producer)
        self.tags = self.producer.service._mover.blocks.tags
        self.transport.hold.set()

    def copy(self, blocks: list[int], into: list[int]) -> None:
        """Hand KEY over as far as a copy that is on its way."""
        self.consumer.open(KEY, self.producer.incarnation)
        self.producer.hand_over(KEY, 4 * len(blocks), blocks, self.consumer.incarnation)
        self.consumer.load(KEY, into)
        self.consumer.until(lambda: self.transport._reads)

    def nothing_is_held(self) -> None:
        """At neither end, tags included."""
        self.consumer.until(lambda: not self.consumer.service.has_pending())
        self.producer.until(lambda: not self.producer.service.has_pending())
        assert all(self.tags.read(block) == CLEARED for block in range(64))


@pytest.fixture
def held(workers) -> Held:
    """Copies that wait, and a short rest of links."""
    return Held(workers, kv_quarantine_seconds=0.5)


def test_no_slot_is_used_and_no_byte_is_packed(workers):
    """The bytes go from P's slab into D's, and tags are gone with the lease."""
    config = make_config(kv_connector="memory_blocks")
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    rows = producer.service._mover.memory.rows.clone()
    consumer.open(KEY, producer.incarnation)
    producer.hand_over(KEY, 14, [9, 3, 7, 1], consumer.incarnation)
    consumer.load(KEY, [5, 6, 0, 2])
    consumer.wait_for(events.Loaded, KEY)
    assert consumer.holds("one", 14, [5, 6, 0, 2])
    assert bool((producer.service._mover.memory.rows == rows).all())
    assert producer.metric("tandem:kv_handoff_phase_seconds_count", phase="pack") == 0
    producer.wait_for(events.Released, KEY)
    tags = producer.service._mover.blocks.tags
    assert all(tags.read(block) == CLEARED for block in range(64))


@pytest.mark.parametrize(
    ("tag", "cause", "rests"),
    [(b"another request!", FailCause.IDENTITY, True), (CLEARED, FailCause.GONE, False)],
    ids=["another's", "cleared"],
)
def test_a_block_without_its_tag_is_never_used(held, tag, cause, rests):
    """One that is another's by now speaks against the link; a lease that ended does not."""
    held.copy([0, 1, 2], [4, 5, 6])
    held.tags._write(1, tag)
    held.transport.hold.clear()
    assert held.consumer.wait_for(events.LoadFailed, KEY).cause is cause
    producer = held.producer.incarnation
    if rests:
        held.consumer.until(lambda: not held.consumer.service.peer_up(producer))
        assert "has the tag of another" in held.consumer.service.why_down(producer)
    else:
        assert held.consumer.service.peer_up(producer)
    held.tags._write(1, CLEARED)
    held.nothing_is_held()


def test_blocks_come_back_only_when_the_copy_into_them_has_ended(held):
    """A request that is cancelled keeps its blocks until nothing can be written there any more."""
    held.copy([0, 1], [4, 5])
    held.consumer.service.cancel(KEY)
    assert not held.consumer.wait_for(events.Cancelled, KEY).blocks_free
    held.producer.wait_for(events.Released, KEY)
    assert not any(isinstance(each, events.BlocksFree) for each in held.consumer.seen)
    assert held.consumer.service.has_pending()
    held.transport.hold.clear()
    held.consumer.wait_for(events.BlocksFree, KEY)
    held.nothing_is_held()


def test_blocks_come_back_though_the_link_is_lost_while_they_are_copied(held):
    """The copy then fails, which is an end, too."""
    held.copy([0, 1], [4, 5])
    held.consumer.service.set_peers([])
    failed = held.consumer.wait_for(events.LoadFailed, KEY)
    assert (failed.cause, failed.blocks_free) == (FailCause.PEER, False)
    held.transport.hold.clear()
    held.consumer.wait_for(events.BlocksFree, KEY)
    held.nothing_is_held()


def test_a_part_names_blocks_that_exist(held):
    """A block out of P's slab is an identity fault, not a copy."""
    say = held.producer.service._mover.say

    def wild(peer, message):
        if isinstance(message, Part):
            message = msgspec.structs.replace(message, blocks=(64,))
        say(peer, message)

    held.producer.service._mover.say = wild
    held.consumer.open(KEY, held.producer.incarnation)
    held.producer.hand_over(KEY, 4, [0], held.consumer.incarnation)
    held.consumer.load(KEY, [1])
    failed = held.consumer.wait_for(events.LoadFailed, KEY)
    assert failed.cause is FailCause.IDENTITY
    assert "block 64 of 64" in failed.message
    assert not held.transport._reads


def test_both_ends_go_by_the_engines_hashes(workers):
    """The same tokens have the same tags; D finds out when P's table has another request's."""
    config = make_config(kv_connector="memory_blocks")
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    assert producer.service.wants_hashes
    assert consumer.service.wants_hashes
    hashes = [BlockHash(bytes([n]) * 16) for n in (1, 2)]
    for key, theirs, ending in (
        (KEY, hashes, events.Loaded),
        (OTHER, hashes[::-1], events.LoadFailed),
    ):
        consumer.open(key, producer.incarnation)
        assert producer.admit(key, 8, consumer.incarnation) is None
        producer.service.computed(key, [0, 1], 8, _Done(), theirs)
        producer.end(key)
        consumer.wait_for(events.Ready, key)
        consumer.service.begin_load(key, [4, 5], 0, 8, hashes)
        consumer.wait_for(ending, key)
    assert consumer.wait_for(events.LoadFailed, OTHER).cause is FailCause.IDENTITY


class _Done:
    """A fence that has been seen."""

    def done(self) -> bool:
        """Yes."""
        return True


def test_a_tag_that_requests_share_is_cleared_by_the_last():
    """A cached prefix is leased to many; who let go of an older content clears nothing."""
    tags = BlockTags(2)
    for key in (KEY, OTHER):
        tags.set(key, 0, b"a" * 16)
    tags.set(KEY, 1, b"b" * 16)
    tags.clear(KEY)
    assert (tags.read(0), tags.read(1)) == (b"a" * 16, CLEARED)
    tags.set(KEY, 0, b"c" * 16)
    tags.clear(OTHER)
    assert tags.read(0) == b"c" * 16
    tags.clear(KEY)
    assert tags.read(0) == CLEARED


def test_tags_differ_by_group_block_and_request():
    """Only full blocks have hashes, which say nothing of the group."""
    hashes = [BlockHash(b"h" * 16)]
    found = {tag_of(key, group, 1, hashes) for key in (KEY, OTHER) for group in (0, 1)}
    found |= {tag_of(KEY, 0, 2, hashes), tag_of(KEY, 0, 0, hashes), tag_of(KEY, 1, 0, hashes)}
    assert len(found) == 7
    assert tag_of(KEY, 0, 0, hashes) == tag_of(OTHER, 0, 0, hashes) == hashes[0]


@pytest.mark.parametrize("connector", ["memory", "memory_blocks"])
def test_a_group_that_no_hand_off_carries_is_refused_by_name_at_pairing(
    workers, connector, monkeypatch, caplog
):
    """Here a sliding window, whose state would be missing at D."""
    group = msgspec.structs.replace(LAYOUT.groups[0], kind=KVKind.WINDOW, span=8)
    fingerprint = msgspec.structs.replace(FINGERPRINT, layout=KVLayout((group,)))
    assert fingerprint.digest != FINGERPRINT.digest
    monkeypatch.setattr("tests.kvtransfer.builders.LAYOUT", fingerprint.layout)
    config = make_config(kv_connector=connector)
    producer = workers(Producer, config, fingerprint=fingerprint)
    consumer = workers(Consumer, config, fingerprint=fingerprint)
    consumer.service.set_peers([producer.service.control])
    producer.until(lambda: producer.metric("tandem:kv_links_refused_total"))
    words = "group 0 of the KV layout is sliding_window; handed over is full_attention"
    consumer.until(lambda: words in caplog.text)
    assert not consumer.service.peer_up(producer.incarnation)


def test_a_peer_with_a_group_that_is_unknown_here_gets_no_link(workers, caplog):
    """Its kind is named, and no probe is begun."""
    config = make_config(kv_connector="memory_blocks")
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    welcome = producer.service._mover.welcome

    def newer(connectors):
        return msgspec.structs.replace(welcome(connectors), groups=("full_attention", "comb"))

    producer.service._channel._welcome = newer
    consumer.service.set_peers([producer.service.control])
    consumer.until(lambda: "comb" in consumer.service.why_down(producer.incarnation))
    assert "here they are full_attention" in consumer.service.why_down(producer.incarnation)
    assert not consumer.service.peer_up(producer.incarnation)


@pytest.mark.parametrize(
    ("kind", "span"),
    [(KVKind.WINDOW, None), (KVKind.WINDOW, 0), (KVKind.ENCODER, None), (KVKind.FULL, 8)],
)
def test_a_span_belongs_to_windows_and_encoders(kind, span):
    """What would be ignored is refused."""
    with pytest.raises(ValueError, match=f"span of a {kind} group"):
        KVGroup(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            block_size=4,
            dtype="float32",
            kind=kind,
            span=span,
        )
