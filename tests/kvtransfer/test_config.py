"""Settings explain and check themselves."""

import socket

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config

from tandem.base.settings import settings_of
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import AddressInUse
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.service.parts import make_transports
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import new_incarnation


def test_settings_share_one_prefix():
    for each in settings_of(KVTransferConfig):
        assert each.name.startswith("kv_")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_connector", "carrier pigeon"),
        ("kv_connector", "memory"),
        ("kv_connector", "memory_blocks"),
        ("kv_slot_bytes", 1),
        ("kv_slots", 0),
        ("kv_credits", True),
        ("kv_control_port", 70000),
        ("kv_lease_seconds", 0),
        ("kv_lease_quota", 1.5),
        ("kv_pull_quota", 0),
        ("kv_pull_quota", 1.5),
        ("kv_pull_peers", -1),
        ("kv_pull_peers", 257),
        ("kv_beat_timeout", 0.6),
        ("kv_probe_bytes", "many"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name, value):
    with pytest.raises(InvalidParameter) as caught:
        KVTransferConfig(**{name: value})
    assert caught.value.param == name


def test_every_duration_reaches_what_it_bounds():
    """By names of its own: what a flag says is what machines, links and warnings go by."""
    config = make_config(
        kv_tombstone_seconds=7,
        kv_wait_seconds=11,
        kv_slow_seconds=3,
        kv_stall_seconds=13,
        kv_lease_quota=0.5,
        kv_lease_backlog=3,
    )
    producer, consumer = Producer(config), Consumer(config)
    try:
        for mover in (producer.service._mover, consumer.service._mover):
            policy = mover.table.policy
            assert (policy.tombstone_ms, policy.wait_ms) == (7_000, 11_000)
        assert consumer.service._mover.throughput._slow_seconds == 3
        for service in (producer.service, consumer.service):
            assert service._channel.terms.times.stall_timeout == 13
        assert producer.service._quota.limit * 3 == producer.service._quota.backlog
    finally:
        consumer.service.close()
        producer.service.close()


def test_data_ports_are_those_that_were_given():
    """One after the other is tried, and no other."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        alone = KVTransferConfig(kv_connector="tcp", kv_data_port=first, kv_data_ports=1)
        (transport,) = make_transports(alone, new_incarnation(), "p").values()
        with pytest.raises(AddressInUse, match=str(first)):
            transport.serve(SlotMemory(2, 4096))
        transport.stop()
        more = KVTransferConfig(kv_connector="tcp", kv_data_port=first, kv_data_ports=50)
        (transport,) = make_transports(more, new_incarnation(), "p").values()
        transport.serve(SlotMemory(2, 4096))
        transport.stop()
