"""KV from block to block: its tags, and the groups of KV that two ends agree on."""

import msgspec
import pytest
from tests.kvtransfer.builders import FINGERPRINT, LAYOUT, Consumer, Producer, make_config, only
from tests.kvtransfer.held_copies import KEY, OTHER

from tandem.kvtransfer import events
from tandem.kvtransfer.memory.blocks import CLEARED, BlockTags, tag_of
from tandem.protocol.card import KVGroup, KVKind, KVLayout
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash


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
        producer.service.computed(key, only([0, 1]), 8, _Done(), theirs)
        producer.end(key)
        consumer.wait_for(events.Ready, key)
        consumer.service.begin_load(key, only([4, 5]), 0, 8, hashes)
        consumer.wait_for(ending, key)
    assert consumer.wait_for(events.LoadFailed, OTHER).cause is FailCause.IDENTITY


class _Done:
    def done(self) -> bool:
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
    """Here keys and values of layers that draft."""
    group = msgspec.structs.replace(LAYOUT.groups[0], kind=KVKind.DRAFT)
    fingerprint = msgspec.structs.replace(FINGERPRINT, layout=KVLayout((group,)))
    assert fingerprint.digest != FINGERPRINT.digest
    monkeypatch.setattr("tests.kvtransfer.builders.LAYOUT", fingerprint.layout)
    config = make_config(kv_connector=connector)
    producer = workers(Producer, config, fingerprint=fingerprint)
    consumer = workers(Consumer, config, fingerprint=fingerprint)
    consumer.service.set_peers([producer.service.control])
    producer.until(lambda: producer.metric("tandem:kv_links_refused_total"))
    words = "group 0 of the KV layout is draft; handed over is full_attention"
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
